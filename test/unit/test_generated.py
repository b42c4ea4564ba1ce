"""The parts of documents that are made from the code are up to date."""

import re
from dataclasses import fields

import pytest

from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.options import RequestOptions
from testing import bar_picture
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


def test_a_bar_is_as_long_as_its_parts_and_all_have_one_scale() -> None:
    svg = bar_picture.draw({"a": {"x": 10, "y": 30}, "b": {"x": 20}}, "ms", (80, "limit"))
    bars = [float(width) for width in re.findall(r'width="([\d.]+)" height="28"', svg)]
    x, y, other = bars
    assert (y, other) == (pytest.approx(3 * x, abs=0.2), pytest.approx(2 * x, abs=0.2))
    line = float(re.search(r'<path d="M([\d.]+) ', svg)[1])  # type: ignore[index]
    assert line - bar_picture.LABEL == pytest.approx(8 * x, abs=0.5)
    assert ">40 ms<" in svg and ">20 ms<" in svg and ">limit<" in svg


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_has_ten_lines_without_its_docstrings(name: str) -> None:
    text = (ROOT / "examples" / "agents" / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith('"""')]
    assert len(lines) <= 10
