"""The parts of documents that are made from the code are up to date."""

import re
from dataclasses import fields

import pytest

from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.options import RequestOptions
from testing import bar_picture, benchmark_pictures
from testing.generated import AGENTS, BLOCKS, PICTURES, renewed
from testing.import_picture import draw
from testing.imports import ROOT


@pytest.mark.parametrize("document", BLOCKS)
def test_blocks_are_what_would_be_written_today(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert text == renewed(document, text), "run `make docs`"


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_are_what_would_be_drawn_today(picture: str) -> None:
    if picture == "docs/frame.svg" and find_library() is None:
        pytest.skip("the C was not compiled, whose work is drawn")
    drawn = (ROOT / picture).read_text(encoding="utf-8")
    assert drawn == PICTURES[picture](), "run `make docs`"


def test_the_words_for_a_frames_picture_have_its_sums() -> None:
    drawn = (ROOT / "docs" / "frame.svg").read_text(encoding="utf-8")
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"!\[(.*)\]\(frame\.svg\)", text)
    assert re.findall(r">(\d+ ms)<", drawn) == re.findall(r"\d+ ms", words)


def test_every_option_has_a_meaning() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > len(fields(RequestOptions))
    assert not [row for row in rows if row.endswith("|  |")]


def test_a_document_without_its_block_is_refused() -> None:
    with pytest.raises(ValueError, match="has no block 'imports'"):
        renewed("docs/how-it-works.md", "# How it works\n")


def test_the_picture_has_every_room_and_every_way() -> None:
    layers = [{"low"}, {"middle", "beside"}, {"high"}]
    imports = {
        "low": set(),
        "middle": {"low", "beside"},
        "beside": set(),
        "high": {"middle", "low"},
    }
    svg = draw(imports, layers)
    assert [name for name in imports if f">{name}</text>" not in svg] == []
    # high -> middle, middle -> low, middle -> beside; high -> low is drawn by way of middle.
    assert svg.count("<path") == svg.count("<polygon") == 3


ROWS = {"a": {"x": 10.0, "y": 30.0}, "b": {"x": 20.0}}


def widths(svg: str) -> list[float]:
    bars = re.findall(rf'width="([\d.]+)" height="{bar_picture.BAR}"', svg)
    return [float(width) for width in bars]


def starts(svg: str) -> list[float]:
    """Return where the bars begin: all but the squares of the legend."""
    found = re.findall(r'<rect x="([\d.]+)" y="\d+" width', svg)
    return [float(start) for start in found[-3:]]


def test_a_bar_is_as_long_as_its_parts_and_all_have_one_scale() -> None:
    svg = bar_picture.draw("Sizes", ROWS, "ms", (80, "limit"))
    x, y, other = widths(svg)
    assert (y, other) == (pytest.approx(3 * x, abs=0.3), pytest.approx(2 * x, abs=0.3))
    after = pytest.approx(bar_picture.LABEL + x, abs=0.1)
    assert starts(svg) == [bar_picture.LABEL, after, bar_picture.LABEL]
    line = float(re.search(r'<path d="M([\d.]+) ', svg)[1])  # type: ignore[index]
    assert line - bar_picture.LABEL == pytest.approx(8 * x, abs=0.5)
    for said in ("Sizes", "40 ms", "20 ms", "limit"):
        assert f">{said}<" in svg


def test_parts_that_are_not_stacked_have_a_bar_and_a_size_each() -> None:
    svg = bar_picture.draw("Sizes", ROWS, "ms", stacked=False)
    x, y, other = widths(svg)
    assert (y, other) == (pytest.approx(3 * x, abs=0.3), pytest.approx(2 * x, abs=0.3))
    assert starts(svg) == [bar_picture.LABEL] * 3
    for said in ("10 ms", "30 ms", "20 ms"):
        assert f">{said}<" in svg


# Pictures of BENCHMARK.md, whose figures are those of the tables in docs/benchmarks/

TABLES = benchmark_pictures.tables()


def test_a_picture_follows_its_table() -> None:
    changed = re.sub(r"(\| ours, float32 \| )[\d,.]+", r"\g<1>1,276", TABLES)
    before, after = map(benchmark_pictures.whole_reply, (TABLES, changed))
    assert after.rows["both in float32"]["this package"] == 1276.0
    assert ">1276 ms<" in after.svg()
    assert "both in float32: this package 1276, " in after.alt()
    assert {**after.rows, "both in float32": None} == {**before.rows, "both in float32": None}


def test_replies_that_are_compared_have_as_many_frames_as_the_picture_says() -> None:
    for others in ("transformers' `generate`", "OpenVINO"):
        section = TABLES.split(f"## Against {others}\n")[1].split("\n## ")[0]
        assert f"{benchmark_pictures.FRAMES} frames" in section


def test_a_table_that_is_missing_or_there_twice_is_refused() -> None:
    table = "| a | b |\n| --- | --- |\n| x | 1,200 ms, 3.5 |\n"
    text = f"## One\nwords\n\n{table}\n## Two\n{table}\n{table}\n"
    ((name, cell),) = benchmark_pictures.cells(text, "One", "a", "b")
    assert (name, benchmark_pictures.numbers(cell)) == ("x", [1200.0, 3.5])
    with pytest.raises(ValueError, match="has no section 'Three'"):
        benchmark_pictures.cells(text, "Three", "a")
    with pytest.raises(ValueError, match="'One' has 0 tables with the columns a, c"):
        benchmark_pictures.cells(text, "One", "a", "c")
    with pytest.raises(ValueError, match="'Two' has 2 tables with the columns a"):
        benchmark_pictures.cells(text, "Two", "a")


def test_words_in_and_beside_bars_have_enough_contrast() -> None:
    """White words stand on the colours, which stand on white: WCAG AA wants 4.5."""
    for colour in bar_picture.COLOURS:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        luminance = sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
        assert 1.05 / (luminance + 0.05) >= 4.5, colour


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_has_ten_lines_without_its_docstrings(name: str) -> None:
    text = (ROOT / "examples" / "agents" / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith('"""')]
    assert len(lines) <= 10
