"""The parts of documents that are written from the code.

    python -m testing.generated

A block stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`; a test compares each
with what would be written today.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial

from qwen3_omni_neuron.options import LOAD_OPTIONS, REQUEST_OPTIONS, Option
from qwen3_omni_neuron.prompt.media.fields import ITEM_FIELDS
from qwen3_omni_neuron.serving.openai.fields import (
    GRAMMAR_FIELDS,
    HONOURED_AS,
    NO_EFFECT,
    OTHER_VOICES,
    REFUSED,
    REFUSED_IN_RESPONSES,
    STRUCTURED,
    STRUCTURED_FIELDS,
)
from qwen3_omni_neuron.serving.settings import SETTINGS
from testing import bar_picture, benchmark_pictures, import_picture, python_page
from testing.imports import LAYERS, ROOT, room_imports

AGENTS = ("openai_agent.py", "livekit_agent.py", "pipecat_agent.py")


def renewed(document: str, text: str) -> str:
    """Return a document's text with each of its blocks written anew."""
    for name, write in BLOCKS[document].items():
        text = with_block(text, name, write())
    return text


def with_block(text: str, name: str, written: str) -> str:
    """Return a document's text with one block written anew."""
    pattern = rf"(<!-- generated: {name} -->\n)(.*?)(<!-- end of {name} -->)"
    found = re.search(pattern, text, re.DOTALL)
    if found is None:
        raise ValueError(f"the document has no block {name!r}.")
    return text[: found.start(2)] + written + text[found.end(2) :]


def layers_table() -> str:
    """Write the layers, the highest first, with what each of their subpackages imports."""
    found = room_imports()
    rows = ["| layer | name | imports |", "| ---: | --- | --- |"]
    for number in range(len(LAYERS), 0, -1):
        for name in sorted(LAYERS[number - 1]):
            imported = ", ".join(f"`{other}`" for other in sorted(found[name])) or "-"
            rows.append(f"| {number} | `{name}` | {imported} |")
    return "\n".join(rows) + "\n"


def request_option_table() -> str:
    """Write every option of a request."""
    return _option_table(REQUEST_OPTIONS)


def load_option_table() -> str:
    """Write every argument of Qwen3Omni.load except the checkpoint."""
    return _option_table(LOAD_OPTIONS.values())


def server_settings_table() -> str:
    """Write every setting of `serve`."""
    lines = ["| what | flag | default | answer |", "| --- | --- | --- | --- |"]
    for one in SETTINGS.values():
        if one.flag:
            what = f"{one.help}{'; repeatable' * (one.default == () and one.name != 'api_keys')}"
            lines.append(f"| {what} | `{one.flag}` | {one.default_text} | {one.answer} |")
    return "\n".join(lines) + "\n"


def voices_table() -> str:
    """Write the voices that speak for OpenAI's and DashScope's."""
    lines = ["| voices of OpenAI and DashScope | speaks |", "| --- | --- |"]
    for voice in dict.fromkeys(OTHER_VOICES.values()):
        names = ", ".join(name for name, speaks in OTHER_VOICES.items() if speaks == voice)
        lines.append(f"| {names} | {voice} |")
    return "\n".join(lines) + "\n"


def without_effect_table() -> str:
    """Write the fields that are taken without effect."""
    lines = ["| request | in | fields without effect |", "| --- | --- | --- |"]
    for path, objects in NO_EFFECT.items():
        for place, names in objects.items():
            listed = " ".join(f"`{name}`" for name in names.split())
            lines.append(f"| `{path}` | {place and f'`{place}`'} | {listed} |")
    return "\n".join(lines) + "\n"


def engine_field_table() -> str:
    """Write the fields that have another name as an option, or can only have one value."""
    lines = ["| field | is, or can only be | instead |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | the option `{option}` | |" for name, option in HONOURED_AS.items()]
    lines += [f"| `{name}` | a grammar: {kind} | |" for name, kind in GRAMMAR_FIELDS.items()]
    lines.append(f"| `{STRUCTURED}` | a grammar: `{'` `'.join(STRUCTURED_FIELDS)}` | |")
    for where, table in (("", REFUSED), (" in a response", REFUSED_IN_RESPONSES)):
        for name, (only, instead) in table.items():
            lines.append(f"| `{name}`{where} | only {json.dumps(only)} | {instead} |")
    return "\n".join(lines) + "\n"


def item_field_table() -> str:
    """Write the fields of media items."""
    lines = ["| field | of | value | meaning |", "| --- | --- | --- | --- |"]
    for field in ITEM_FIELDS:
        kinds = ", ".join(field.kinds) + (": files alone" if field.of_files else "")
        kinds += "" if field.over_http else ", in Python alone"
        lines.append(f"| `{field.name}` | {kinds} | {field.values.phrase} | {field.help} |")
    return "\n".join(lines) + "\n"


def agent_block(name: str) -> str:
    """Write a file of examples/agents, which `make test-clients` runs, as a block."""
    code = (ROOT / "examples" / "agents" / name).read_text(encoding="utf-8")
    mark = "not run here: make test-clients runs it, with packages that make test does not have"
    return f"<!-- {mark} -->\n```python\n{code}```\n"


def picture_of_imports() -> str:
    """Draw the imports of the package's rooms."""
    return import_picture.draw(room_imports(), LAYERS)


def _option_table(options: Iterable[Option]) -> str:
    lines = ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for option in options:
        meaning = option.help
        if option.values is not None:
            meaning += f"; {option.values.phrase}"
        kind = _type_text(option.type)
        lines.append(f"| `{option.name}` | {kind} | {option.default_text} | {meaning} |")
    return "\n".join(lines) + "\n"


def _type_text(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if "Callable" in text:
        return "function"
    text = re.sub(r"\b(?:\w+\.)+", "", text).replace(" | ", " or ")
    return text.replace("str or Any", "str or torch.dtype")


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "BENCHMARK.md": {"pictures": benchmark_pictures.block},
    "docs/options.md": {
        "request options": request_option_table,
        "load options": load_option_table,
        "fields of media items": item_field_table,
    },
    "docs/agent.md": {name: partial(agent_block, name) for name in AGENTS},
    python_page.DOCUMENT: {name: partial(python_page.block, name) for name in python_page.names()},
    "docs/how-it-works.md": {"imports": layers_table},
    "docs/serving.md": {
        "settings of serve": server_settings_table,
        "other voices": voices_table,
        "fields of engines": engine_field_table,
        "fields without effect": without_effect_table,
    },
}
PICTURES: dict[str, Callable[[], str]] = {
    "docs/imports.svg": picture_of_imports,
    "docs/frame.svg": bar_picture.frame_costs,
    "docs/turns.svg": bar_picture.turns_of_a_conversation,
    **{
        f"{benchmark_pictures.FOLDER}/{name}.svg": partial(benchmark_pictures.svg, name)
        for name in benchmark_pictures.PICTURES
    },
}


def main() -> None:
    """Write every block, and every picture."""
    for document in BLOCKS:
        path = ROOT / document
        path.write_text(renewed(document, path.read_text(encoding="utf-8")), encoding="utf-8")
    for picture, draw in PICTURES.items():
        (ROOT / picture).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
