"""The parts of documents that are made from the code are up to date."""

from dataclasses import fields

import pytest

from qwen3_omni_neuron.options import RequestOptions
from testing.generated import BLOCKS, PICTURE, renewed
from testing.import_picture import draw
from testing.imports import LAYERS, ROOT, room_imports


@pytest.mark.parametrize("document", BLOCKS)
def test_blocks_are_what_would_be_written_today(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert text == renewed(document, text), "run `make docs`"


def test_the_picture_is_of_todays_imports() -> None:
    drawn = (ROOT / PICTURE).read_text(encoding="utf-8")
    assert drawn == draw(room_imports(), LAYERS), "run `make docs`"


def test_every_option_has_a_meaning() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > len(fields(RequestOptions))
    assert not [row for row in rows if row.endswith("|  |")]


def test_a_document_without_its_block_is_refused() -> None:
    with pytest.raises(ValueError, match="has no block 'imports'"):
        renewed("docs/architecture.md", "# Architecture\n")


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
