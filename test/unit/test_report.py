"""The report of result files: what it shows, that it shows it, and that it needs nothing else."""

import base64
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import rc_params_from_file
from matplotlib.colors import to_rgb
from numpy.typing import NDArray
from PIL import Image

from bench import report
from bench.common.metrics import silences
from bench.reporting.page import page_of
from bench.reporting.sound import WINDOW, NoSoundError, power_of, spectrogram
from bench.reporting.sources import REPLAY, Source, configuration, load_sources, median_request
from bench.reporting.style import CHUNK_SHADES, PAPER, STAGES, STYLE, Picture
from bench.reporting.tables import compare, comparisons, differences
from bench.reporting.timeline import lanes_of
from bench.reporting.words import less_is_better, seconds, significant, title_of, value_of
from testing import report_cases as made

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason=f"none of {', '.join(BROWSERS)} on PATH"
)


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def sections(self) -> list[str | None]:
        return [attributes.get("id") for attributes in self.of("section")]


def pixels(png: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def near(picture: NDArray[np.uint8], colour: str) -> int:
    """Return how many pixels are nearly of a colour."""
    wanted = 255 * np.array(to_rgb(colour))
    return int((np.abs(picture.astype(int) - wanted).max(axis=2) <= 6).sum())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report with all that there is: two measured files and a replay."""
    folder = tmp_path_factory.mktemp("report")
    first = made.requests([0.06, 0.08, 0.10, 0.12], save_audio="wavs")
    first["rows"][-1]["audio_file"] = first["rows"][0]["audio_file"] = "sky.wav"
    made.write_sound(folder / "wavs" / "sky.wav", 7 * 1920 - 555)
    files = [
        made.write(folder, "one.json", first),
        made.write(folder, "four.json", made.requests([0.12, 0.16, 0.2, 0.24], concurrency=4)),
        made.write(folder, "re.json", made.replay()),
    ]
    out = folder / "out"
    assert report.main([*map(str, files), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def page(full: Path) -> Page:
    return Page((full / "index.html").read_text(encoding="utf-8"))


def test_every_section_is_there(page: Page) -> None:
    assert page.sections == [
        "compare-1",
        "timeline-a",
        "timeline-b",
        "ttfb",
        "latency",
        "rtf",
        "ttfb-replay",
        "rtf-replay",
        "spectrogram-a",
        "missing",
        "figures",
        "settings",
    ]
    anchors = [a["href"] for a in page.of("a")]
    assert {f"#{name}" for name in page.sections if name != "missing"} == set(anchors)
    assert "B: four.json: no spectrogram: no sound was kept." in page.text


def test_the_page_refers_to_nothing_outside_itself(full: Path, page: Page) -> None:
    """Neither in an attribute nor in its style; and it forbids the browser to ask."""
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object", "embed", "video", "audio")
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), f"{tag} {name}={value[:80]}"
    text = (full / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|url\(|@import", re.sub(r'src="data:[^"]*"', "", text))
    (policy,) = [m["content"] for m in page.of("meta") if "http-equiv" in m]
    assert policy is not None and policy.startswith("default-src 'none'")


def test_every_picture_is_in_the_page_and_beside_it(full: Path, page: Page) -> None:
    files = {file.name: file.read_bytes() for file in full.glob("*.png")}
    pictures = page.of("img")
    names = [f"{name}.png" for name in page.sections if f"{name}.png" in files]
    assert len(pictures) == len(names) == len(files) == 8
    for name, picture in zip(names, pictures, strict=True):
        head, _, data = (picture["src"] or "").partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data) == files[name]


@pytest.mark.parametrize(
    "name",
    [
        *("timeline-a", "timeline-b", "ttfb", "latency", "rtf"),
        *("ttfb-replay", "rtf-replay", "spectrogram-a"),
    ],
)
def test_no_plot_is_empty(full: Path, name: str) -> None:
    """Colours, and ink in the middle half of the picture, where neither title nor labels are."""
    picture = pixels((full / f"{name}.png").read_bytes())
    height, width, _ = picture.shape
    assert width >= 1200
    middle = picture[height // 4 : -height // 4, width // 4 : -width // 4]
    for part in (picture, middle):
        assert len(np.unique(part.astype(int) @ (1, 256, 65536))) > 20
    coloured = np.ptp(middle.astype(int), axis=2) > 30
    assert coloured.sum() > 500


def test_a_timeline_has_each_stage_in_its_colour(full: Path) -> None:
    picture = pixels((full / "timeline-a.png").read_bytes())
    for stage in {name for name, _, _ in made.CALLS}:
        assert near(picture, STAGES[stage]) > 100, stage


def test_alternative_texts_say_what_is_to_be_seen(page: Page) -> None:
    alts = {
        name: str(picture["alt"])
        for name, picture in zip(page.sections[1:-3], page.of("img"), strict=True)
    }
    # 60, 80, 100 and 120 ms: nearest to 90 ms of those with a timeline is the first.
    for words in (
        "first sample after 60.0 ms (TTFB)",
        "First text after 30.0 ms",
        "chunks of 1, 2, 4",
    ):
        assert words in alts["timeline-a"]
    assert "thinker decode 2 calls, 9.00 ms" in alts["timeline-a"]
    assert "A: 1 at a time: p50 90.0 ms, p95 117 ms, 4 requests" in alts["ttfb"]
    assert "A, TTFB: p50 90.0 ms, p90 114 ms, p95 117 ms." in alts["latency"]
    assert "ours, split, 8 at a time: 0.700" in alts["rtf-replay"]
    # Chunks of 1365, 3840 and 7680 samples; the tone is at 3 kHz.
    assert "Chunks meet at 0.06 s, 0.22 s." in alts["spectrogram-a"]
    assert "Half of its power lies below 3.0 kHz." in alts["spectrogram-a"]


def test_truncated_replies_stand_apart(page: Page) -> None:
    alts = [str(picture["alt"]) for picture in page.of("img")]
    (rtf,) = [alt for alt in alts if alt.startswith("RTF")]
    # Of 60, 80, 120 ms, the last chunk 100 ms later, over 12885 samples: (180 ms) / 0.537 s.
    assert "all, 1 at a time: 0.335 (3)" in rtf
    assert "all, cut by a limit, 1 at a time: 0.373 (1)" in rtf
    assert "Hollow: a token limit cut it." in page.text


def test_a_replay_is_labelled_wherever_it_is_shown(full: Path, page: Page) -> None:
    badges = [span for span in page.of("span") if span.get("class") == "replay"]
    # Of its row among the files, its figures, and its column in each of three tables.
    assert len(badges) == 1 + 1 + 3
    assert "nothing was measured" in page.text
    shown = list(zip(page.sections[1:-3], page.of("img"), strict=True))
    for name, picture in shown:
        alt = str(picture["alt"])
        assert alt.startswith(REPLAY) == str(name).endswith("-replay")
    assert page.text.count(f"TTFB by configuration ({REPLAY})") == 2  # contents and heading


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    """The same requests, once as they were measured and once as a replay of them."""
    folder = tmp_path_factory.mktemp("twins")
    content = made.requests([0.06, 0.08, 0.1])
    label = {"settings": {**content["settings"], "label": "replay"}}
    files = [made.write(folder, "a.json", content)]
    return load_sources([*files, made.write(folder, "b.json", content | label)])


def test_a_replay_and_a_measurement_share_no_plot(twins: list[Source]) -> None:
    """And the label is ink: in the title, and across the plot."""
    drawn = {picture.name: picture for picture in report.draw(twins)[0]}
    pairs = [("timeline-a", "timeline-b")]
    pairs += [(name, f"{name}-replay") for name in ("ttfb", "latency", "rtf")]
    assert sorted(drawn) == sorted(name for pair in pairs for name in pair)
    for pair in pairs:
        measured, replayed = (pixels(drawn[name].png) for name in pair)
        heads = [int((picture[:60] < 100).all(axis=2).sum()) for picture in (measured, replayed)]
        assert heads[1] > 1.2 * heads[0], pair
        ink = [int((picture < 250).any(axis=2).sum()) for picture in (measured, replayed)]
        assert ink[1] > ink[0] + 5000, pair
        assert [REPLAY in drawn[name].title for name in pair] == [False, True]


def test_a_replay_and_a_measurement_are_not_compared(twins: list[Source]) -> None:
    found = compare(*twins)
    assert not found.comparable and not found.sentences
    assert set(found.figures.frame["in words"]) == {"not comparable"}
    assert found.differences.frame.iloc[0].tolist()[2:] == ["measured", REPLAY]
    assert "neither is better for it" in Page(page_of(twins, [found], [], [])).text


@pytest.mark.parametrize(
    "change",
    [
        {"benchmark": "replay"},
        {"settings": {**made.SETTINGS, "label": "replay"}},
        {"summary": {"label": "replay"}},
        {"rows": [{"kind": "replay"}]},
    ],
)
def test_what_makes_a_replay(tmp_path: Path, change: dict[str, Any]) -> None:
    plain = made.results([], {}, benchmark="other")
    files = [made.write(tmp_path, "a.json", plain), made.write(tmp_path, "b.json", plain | change)]
    assert [source.is_replay for source in load_sources(files)] == [False, True]


def test_side_by_side_with_ratios_by_hand(tmp_path: Path) -> None:
    summary = {
        "requests_per_s": 4.0,
        "audio_s": 3.0,
        "underruns": 0,
        "verdict": "pass",
        "all": {"ttfb_s": {"count": 8, "mean": 0.05, "p50": 0.05, "p95": 0.2, "p99": 0.3}},
        "complete": {"ttfb_s": {"count": 8, "p50": 0.05}, "rtf": {"count": 8, "p50": 0.5}},
        "truncated": {"rtf": None},
    }
    other = json.loads(json.dumps(summary))
    other |= {"requests_per_s": 6.0, "underruns": 2, "verdict": "fail"}
    other["all"]["ttfb_s"] |= {"p50": 0.04, "p95": 0.25}
    other["complete"]["rtf"] = {"count": 8, "p50": 0.5}
    other["truncated"] = {"rtf": {"count": 1, "p50": 0.7}}
    files = [
        made.write(tmp_path, "a.json", made.results([], summary)),
        made.write(tmp_path, "b.json", made.results([], other)),
    ]
    found = compare(*load_sources(files))
    lines = list(found.figures.frame.itertuples(index=False, name=None))
    wanted = [
        ("TTFB p50, all requests", "50.0 ms", "40.0 ms", "0.80", "B is better"),
        ("TTFB p95, all requests", "200 ms", "250 ms", "1.25", "A is better"),
        ("RTF p50, complete replies", "0.500", "0.500", "1.00", "the same"),
        ("RTF count, truncated replies", "-", "1", "-", "only B has it"),
        ("RTF p50, truncated replies", "-", "0.700", "-", "only B has it"),
        ("requests a second", "4.00", "6.00", "1.50", "B is better"),
        ("audio", "3.00 s", "3.00 s", "1.00", "the same"),
        ("underruns", "0", "2", "-", "A is better"),
        ("verdict", "pass", "fail", "-", "different"),
    ]
    for line, by_hand in zip(lines, wanted, strict=True):
        assert line == by_hand
    assert found.sentences[0] == (
        "TTFB p50, all requests: 50.0 ms in A, 40.0 ms in B, 0.80 times as much. Less is better."
    )
    assert found.differences.frame.empty


def test_what_differs_is_said_before_what_follows_from_it(tmp_path: Path) -> None:
    first, second = made.requests([0.1]), made.requests([0.2], concurrency=4, speaker="Ethan")
    second["versions"] = {
        **second["versions"],
        "torch": "2.9.0",
        "machine": {**made.MACHINE, "cpu": "Another CPU"},
    }
    second["settings"]["save_audio"] = "elsewhere"  # changes no figure
    files = [made.write(tmp_path, "a.json", first), made.write(tmp_path, "b.json", second)]
    sources = load_sources(files)
    found = differences(*sources).frame.itertuples(index=False, name=None)
    assert list(found) == [
        ("setting", "concurrency", "1", "4"),
        ("setting", "speaker", "not there", "Ethan"),
        ("version", "torch", "2.13.0", "2.9.0"),
        ("machine", "cpu", "Made-up CPU", "Another CPU"),
        ("machine", "threads", "1", "not there"),
    ]
    text = Page(page_of(sources, comparisons(sources), [], [])).text
    assert text.index("What differs") < text.index("times as much") < text.index("A is better")


def test_files_of_other_benchmarks_are_not_compared(tmp_path: Path) -> None:
    files = [
        made.write(tmp_path, "a.json", made.results([], {"wer": 0.1}, benchmark="asr")),
        made.write(tmp_path, "b.json", made.results([], {"wer": 0.1}, benchmark="asr2")),
    ]
    assert report.main([*map(str, files), "--out", str(tmp_path)]) == 0
    page = Page((tmp_path / "index.html").read_text(encoding="utf-8"))
    assert page.sections == ["figures", "settings"]
    assert "side by side" not in page.text and "0.100" in page.text


def test_rows_that_are_no_requests_are_a_table(tmp_path: Path) -> None:
    rows = [{"stage": f"stage {n}", "median_s": 0.002, "sizes": [1]} for n in range(70)]
    sources = load_sources([made.write(tmp_path, "a.json", made.results(rows, {}, "stages"))])
    page = Page(page_of(sources, [], [], []))
    assert "Cases, the first 60 of 70" in page.text
    assert page.text.count("2.00 ms") == 60 and "stage 59" in page.text
    assert "stage 60" not in page.text and "sizes" not in page.text


def test_commands_versions_and_machines_are_printed(page: Page) -> None:
    for words in (
        "python -m bench.ttfb_rtf --seed 0",
        "2.13.0",
        "Made-up CPU",
        "8192 MB",
        "python",
    ):
        assert words in page.text
    assert "tiny checkpoint of random weights, mixed, Made-up CPU, 2 cores" in page.text


def test_what_a_file_says_is_text_and_no_markup(tmp_path: Path) -> None:
    content = made.requests([0.1], speaker='<script>alert("x")</script>')
    sources = load_sources([made.write(tmp_path, "a.json", content)])
    odd = Picture("odd", "<b>odd</b>", '"><img src="x">', "<i>", b"")
    page = Page(page_of(sources, [], [odd], ["<u>"]))
    (image,) = page.of("img")
    assert image["alt"] == odd.alt
    assert not {tag for tag, _ in page.tags} & {"script", "b", "i", "u"}
    assert "<script>alert" in page.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "can't be read"),
        ({"rows": []}, 'no "schema"'),
        (made.results([], {}) | {"schema": 9}, "schema 9, and 1 is read here"),
        ({k: v for k, v in made.results([], {}).items() if k != "summary"}, "has no summary"),
        (made.results([made.request(0, 0.1, ttfb_s="0.1")], {}), "rows[0].ttfb_s is '0.1', no v"),
        (
            made.results([made.request(0, 0.1, total_s=float("nan"))], {}),
            "total_s is nan, no",
        ),
        (
            made.results([made.request(0, 0.1, truncated=None)], {}),
            "truncated is None, no",
        ),
        (made.results([made.request(0, 0.1, frames=True)], {}), "rows[0].frames is True, no valid"),
        (made.results([made.request(0, 0.1, chunks=3)], {}), "rows[0].chunks is 3, no valid list"),
        (made.results([made.request(0, 0.1, chunks=[3])], {}), "rows[0].chunks[0] is a int"),
        (made.results([made.request(0, 0.1, timeline=[{}])], {}), "rows[0].timeline[0].stage is"),
        (made.results([made.case("x", 1, 0.1, 0.2) | {"requests": -1}], {}), "is -1, no valid int"),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, words: str
) -> None:
    file = made.write(tmp_path, "odd.json", content)
    if isinstance(content, str):
        file.write_text(content)
    assert report.main([str(file), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("report.py: ") and str(file) in error and words in error
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_and_a_folder_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(tmp_path / "none.json")]) == 1
    file = made.write(tmp_path, "a.json", made.requests([0.1]))
    assert report.main([str(file), "--out", str(file)]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "none.json can't be read" in first and "a.json" in second


@pytest.mark.parametrize(
    ("samples", "words"), [(None, "is not there, nor beside"), (1000, "1000 samples, and the requ")]
)
def test_a_sound_that_is_not_the_requests_is_not_drawn(
    tmp_path: Path, samples: int | None, words: str
) -> None:
    content = made.requests([0.1], save_audio="wavs")
    content["rows"][0]["audio_file"] = "sky.wav"
    if samples:
        made.write_sound(tmp_path / "wavs" / "sky.wav", samples)
    (source,) = load_sources([made.write(tmp_path, "a.json", content)])
    with pytest.raises(NoSoundError, match=words):
        spectrogram(source, source.requests[0])


def test_requests_that_failed_or_did_not_speak(tmp_path: Path) -> None:
    """They are in no plot, and break none."""
    silent = made.request(1, 0.1, ttfb_s=None, rtf=None, audio_s=0.0, chunks=[])
    failed = {"request": 2, "conversation": "sky", "seed": 2, "error": "BusyError"}
    file = made.write(tmp_path, "a.json", made.results([silent, failed], {}))
    (source,) = load_sources([file])
    assert [request.request for request in source.requests] == [1]
    pictures, missing = report.draw([source])
    assert [picture.name for picture in pictures] == ["latency"]
    assert "--timeline" in missing[0]


def test_the_request_that_is_drawn_is_the_median_one(tmp_path: Path) -> None:
    file = made.write(tmp_path, "a.json", made.requests([0.5, 0.1, 0.2, 0.3, 0.9]))
    (source,) = load_sources([file])
    chosen = median_request(source.requests)
    assert chosen is not None and chosen.request == 3
    # Of the two that have a timeline, the first and the last, 0.5 is nearer to 0.3.
    timed = median_request(source.requests, lambda request: not request.timeline)
    assert timed is not None and timed.request == 0
    assert median_request([]) is None


def test_a_player_waits_between_chunks_that_come_late(tmp_path: Path) -> None:
    """The first chunk plays for 1365 samples, 56.875 ms; one that comes later finds silence."""
    row = made.request(0, 0.1)
    row["chunks"][1]["arrival_s"] = 0.2
    file = made.write(tmp_path, "a.json", made.results([row], {}))
    (source,) = load_sources([file])
    (gap,) = silences(*source.requests[0].arrivals)
    assert gap == pytest.approx((0.1 + 0.056875, 0.2))


def test_lanes_are_in_the_order_of_the_stages_with_their_totals(tmp_path: Path) -> None:
    content = made.requests([0.1])
    content["rows"][0]["timeline"][0]["stage"] = "a stage of tomorrow"
    (source,) = load_sources([made.write(tmp_path, "a.json", content)])
    lanes = lanes_of(source.requests[0])
    assert list(lanes.index) == [*list(STAGES)[1:], "a stage of tomorrow"]
    assert lanes.loc["thinker decode"].tolist() == [2, pytest.approx(0.009), "2 calls, 9.00 ms"]


def test_configurations_are_named_by_what_differs(tmp_path: Path) -> None:
    # Where the sound was written is no difference.
    contents = [made.requests([0.1], speaker="Ethan", save_audio="wavs")]
    contents += [made.requests([0.1], chunk_frames=[1, 2])]
    files = [made.write(tmp_path, f"{n}.json", content) for n, content in enumerate(contents)]
    first, second = load_sources(files)
    assert configuration(first, [first, second]) == "speaker Ethan"
    assert configuration(second, [first, second]) == "chunk frames 1, 2"
    assert configuration(first, [first]) == ""
    assert configuration(first, [first, second], without=("speaker",)) == ""


def test_power_of_a_tone() -> None:
    tone = np.sin(2 * np.pi * 3000 * np.arange(24000) / 24000).astype(np.float32)
    power, hertz = power_of(tone, 24000)
    assert power.shape[0] == WINDOW // 2 + 1
    assert power.max() == 1 and power.min() >= 1e-8
    assert (hertz[power[:, 4:-4].argmax(axis=0)] == 3000).all()
    assert np.isfinite(power_of(np.zeros(2000, np.float32), 24000)[0]).all()


def test_words() -> None:
    assert [seconds(s) for s in (0.0, 0.0424, 0.9996, 1.759, 120.0)] == [
        *("0 ms", "42.4 ms", "1000 ms", "1.76 s", "120 s")
    ]
    assert [significant(v) for v in (0.0863, 12.34, 1234.5, -0.5)] == [
        *("0.0863", "12.3", "1234", "-0.500")
    ]
    assert value_of("memory_mb", 24106) == "24106 MB"
    assert value_of("ttfb_s_at_once", [1, 2]) == "1, 2"
    assert value_of("truncated", True) == "yes"
    assert title_of(("all", "ttfb_s", "p50")) == "TTFB p50, all requests"
    assert title_of(("audio_s_per_s",)) == "audio a second"
    judged = {"ttfb_s": True, "rtf": True, "requests_per_s": False, "audio_s": None, "frames": None}
    assert {name: less_is_better((name,)) for name in judged} == judged
    assert less_is_better(("all", "ttfb_s", "p50")) is True
    assert less_is_better(("all", "ttfb_s", "count")) is None


def contrast(first: str, second: str) -> float:
    """The contrast of two colours, as WCAG defines it."""

    def luminance(colour: str) -> float:
        rgb = np.array(to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_colours_stand_out() -> None:
    """3 : 1 for what is drawn, 4.5 : 1 for what is read, on the plots and on both pages."""
    for stage, colour in STAGES.items():
        assert contrast(colour, PAPER) >= 3, stage
    assert len(set(STAGES.values())) == len(STAGES)
    for shade in CHUNK_SHADES:
        assert contrast(PAPER, shade) >= 4.5  # chunks bear their frames
    style = rc_params_from_file(STYLE, use_default_template=False)
    assert contrast(style["text.color"], PAPER) >= 4.5
    for look in style["axes.prop_cycle"]:
        assert contrast(look["color"], PAPER) >= 3
    template = STYLE.with_name("page.html").read_text(encoding="utf-8")
    themes = re.findall(r":root \{(.*?)\}", template, re.DOTALL)
    assert len(themes) == 3  # light, dark, printed
    for theme in themes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", theme))
        for ink in ("ink", "quiet", "link"):
            assert contrast(colours[ink], colours["paper"]) >= 4.5
        assert contrast(colours["replay-ink"], colours["replay-paper"]) >= 4.5


def browse(file: Path, folder: Path) -> tuple[list[str], list[str], NDArray[np.uint8]]:
    """Log of a browser without a network: the addresses that the page asked it
    for, and what it shows. What the browser asks for itself has no origin."""
    log, shot = folder / "net.json", folder / "page.png"
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"),
        *("--enable-logging=stderr", "--log-level=0", "--no-first-run", f"--log-net-log={log}"),
        *("--window-size=1200,4000", f"--screenshot={shot}", file.as_uri()),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = [e.get("params", {}) for e in json.loads(log.read_text(encoding="utf-8"))["events"]]
    asked = [e["url"] for e in events if e.get("initiator", "not an origin") != "not an origin"]
    return console, asked, pixels(shot.read_bytes())


@needs_browser
def test_a_browser_shows_it_without_error_and_without_a_request(full: Path, tmp_path: Path) -> None:
    console, asked, shown = browse(full / "index.html", tmp_path)
    assert not console and not asked
    for stage in ("code predictor", "code2wav"):
        assert near(shown, STAGES[stage]) > 100  # the timeline was decoded and drawn


@needs_browser
def test_the_browser_would_tell_of_an_error_and_of_a_request(tmp_path: Path) -> None:
    policy = '<meta http-equiv="Content-Security-Policy" content="img-src data:">'
    outside = (
        '<link rel="stylesheet" href="http://example.org/a.css"><img src="http://example.org/b">'
    )
    (tmp_path / "odd.html").write_text(f"{policy}{outside}", encoding="utf-8")
    console, asked, _ = browse(tmp_path / "odd.html", tmp_path)
    assert any("Content Security Policy" in line for line in console)
    assert set(asked) == {"http://example.org/a.css"}
