"""The report of result files: what it shows, what it explains, and what it refuses."""

from bench import report
from testing import report_cases as made


def test_a_file_that_is_no_result_is_refused_by_name(tmp_path, capsys) -> None:
    for content, words in (
        ("not json", "can't be read"),
        ({"rows": []}, 'no "schema"'),
        (made.results([made.request(0, 0.1, ttfb_s="0.1")], {}), "rows[0].ttfb_s is '0.1', no v"),
        (made.results([made.request(0, 0.1, total_s=float("nan"))], {}), "total_s is nan, no v"),
        (made.results([made.request(0, 0.1, truncated=None)], {}), "truncated is None, no valid"),
        (made.results([made.request(0, 0.1, frames=True)], {}), "frames is True, no valid int"),
        (made.results([made.request(0, 0.1, chunks=[3])], {}), "rows[0].chunks[0] is a int"),
        (made.results([made.request(0, 0.1, timeline=[{}])], {}), "rows[0].timeline[0].stage is"),
        (made.results([{"ttfb_p50_s": "x"}], {}), "rows[0].concurrency is None, no valid int"),
    ):
        file = made.write(tmp_path, "odd.json", content)
        assert report.main([str(file), "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert error.startswith("report.py: ") and str(file) in error and words in error
        assert not (tmp_path / "out").exists()
