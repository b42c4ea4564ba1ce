"""The parts of documents that are written from the code.

    python -m testing.generated

A block stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`; a test compares each
with what would be written today. In a table of options the last column is written by hand and kept,
unless an option's field has a text of its own in its metadata.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.options import RequestOptions
from testing.import_picture import draw
from testing.imports import LAYERS, ROOT, room_imports

PICTURE = Path("docs/imports.svg")
HELP = "help"  # the metadata's key


def renewed(document: str, text: str) -> str:
    """Return a document's text with each of its blocks written anew."""
    for name, write in BLOCKS[document].items():
        pattern = rf"(<!-- generated: {name} -->\n)(.*?)(<!-- end of {name} -->)"
        found = re.search(pattern, text, re.DOTALL)
        if found is None:
            raise ValueError(f"{document} has no block {name!r}.")
        text = text[: found.start(2)] + write(found[2]) + text[found.end(2) :]
    return text


def layers_table(_: str) -> str:
    """Write the layers, the highest first, with the rooms that each of their rooms imports."""
    found = room_imports()
    rows = ["| layer | room | imports |", "| ---: | --- | --- |"]
    for number in range(len(LAYERS), 0, -1):
        for name in sorted(LAYERS[number - 1]):
            imported = ", ".join(f"`{other}`" for other in sorted(found[name])) or "-"
            rows.append(f"| {number} | `{name}` | {imported} |")
    return "\n".join(rows) + "\n"


def request_options_table(old: str) -> str:
    """Write every option of a request, with its type and default."""
    rows = []
    for option in fields(RequestOptions):
        default = "" if option.default is MISSING else repr(option.default)
        rows.append((option.name, _type_text(option.type), default, option.metadata.get(HELP, "")))
    return _options_table(rows, old)


def load_options_table(old: str) -> str:
    """Write every argument of Qwen3Omni.load but the checkpoint."""
    parameters = list(inspect.signature(Qwen3Omni.load).parameters.values())[1:]
    rows = [(p.name, _type_text(p.annotation), repr(p.default), "") for p in parameters]
    return _options_table(rows, old)


def _options_table(rows: list[tuple[str, str, str, str]], old: str) -> str:
    meanings = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*?) \|$", old, re.MULTILINE))
    lines = ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, kind, default, own in rows:
        meaning = own or meanings.get(name, "")
        lines.append(f"| `{name}` | {kind} | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def _type_text(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if "Callable" in text:
        return "function"
    return re.sub(r"\b(?:\w+\.)+", "", text).replace(" | ", " or ")


BLOCKS: dict[str, dict[str, Callable[[str], str]]] = {
    "docs/options.md": {
        "request options": request_options_table,
        "load options": load_options_table,
    },
    "docs/architecture.md": {"imports": layers_table},
}


def main() -> None:
    """Write every block, and the picture of the imports."""
    for document in BLOCKS:
        path = ROOT / document
        path.write_text(renewed(document, path.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / PICTURE).write_text(draw(room_imports(), LAYERS), encoding="utf-8")


if __name__ == "__main__":
    main()
