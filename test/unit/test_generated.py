"""The parts of documents that are made from the code are up to date."""

from dataclasses import fields

import pytest

from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.options import RequestOptions
from testing.generated import AGENTS, BLOCKS, PICTURES, renewed
from testing.imports import ROOT


@pytest.mark.parametrize("document", BLOCKS)
def test_blocks_are_what_would_be_written_today(document) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert text == renewed(document, text), "run `make docs`"


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_are_what_would_be_drawn_today(picture) -> None:
    if picture == "docs/frame.svg" and find_library() is None:
        pytest.skip("the C was not compiled, whose work is drawn")
    assert (ROOT / picture).read_text(encoding="utf-8") == PICTURES[picture](), "run `make docs`"


def test_every_option_has_a_meaning() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > len(fields(RequestOptions))
    assert not [row for row in rows if row.endswith("|  |")]


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_has_ten_lines_without_its_docstrings(name) -> None:
    text = (ROOT / "examples" / "agents" / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith('"""')]
    assert len(lines) <= 10
