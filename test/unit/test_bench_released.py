"""bench.released, over the tiny size."""

import pytest

from bench import released
from qwen3_omni_neuron.compilation import runner
from qwen3_omni_neuron.cpu.native.installed import find_library
from testing.results import load_results


@pytest.mark.skipif(
    find_library() is None, reason="the C was not compiled, and these are the bytes that it reads"
)
@pytest.mark.release
def test_the_released_size_is_measured_from_drawn_weights(tmp_path, monkeypatch) -> None:
    """Here the tiny size, without processes: the tree is compiled, every figure is there."""
    monkeypatch.setattr(
        runner, "run_worker", lambda compile_model, *given: compile_model(*given[:3])
    )
    monkeypatch.setattr(released, "in_new_process", lambda function, *given: function(*given))
    small = ["--array-mb", "1", "--product-size", "64", "--repeats", "2", "--prompt", "16"]
    few = ["--tokens", "4", "--frames", "6", "--positions", "80", "--threads", "1"]
    file = tmp_path / "result.json"
    words = ["--size", "tiny", "--folder", str(tmp_path / "made"), "--json", str(file)]
    assert not released.main([*words, *small, *few])
    results = load_results(file)
    parts = {(row["stage"], row["frames"]) for row in results.rows}
    assert parts == {
        ("thinker prefill", None),
        ("thinker decode", None),
        ("talker step", 1),
        ("code predictor", 1),
        ("code2wav step", 1),
        ("code2wav step", released.CHUNK),
    }
    for row in results.rows:
        assert row["ratio"] == pytest.approx(row["median_s"] / row["limit_s"])  # of one thread
    found = results.summary
    assert found["audio_s"] == pytest.approx(6 * 0.08, abs=0.03)
    assert 0 < found["ttft_s"] < found["ttfb_s"] <= found["total_s"]
    assert found["rtf"] > 0 and found["parts_rtf"] > 0 and found["peak_mb"] > 50
    assert 0 < found["question_ttft_s"] <= found["question_ttfb_s"]
    calls_s = found["question_calls_s"]
    assert {"thinker prefill", "talker prefill", "code predictor", "code2wav"} <= calls_s.keys()
    assert calls_s["thinker prefill"] < found["question_ttft_s"]
    assert found["rates_before"].keys() == found["rates_after"].keys() <= results.rows[0].keys()
    assert found["first_sample_s"] > 0
    tree = tmp_path / "made" / "int4"
    size = sum(f.stat().st_size for f in tree.rglob("*") if f.is_file())
    assert found["tree_gb"] * 1e9 == pytest.approx(size)
