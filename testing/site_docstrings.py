"""An extension of Griffe (mkdocs.yml): a docstring's parameters and fields become a list."""

import re
from typing import Any

from griffe import Class, Extension, Function, Object

# What describes a parameter begins a sentence with its name and a colon; one may describe several.
_BEGINNING = r"(?:^|(?<=[.;)])\s)"
_RESULT = re.compile(rf"{_BEGINNING}(?=(?:Returns?|Raises|Source:?)\s)", re.MULTILINE)


class ParametersAsList(Extension):
    """Extension that rewrites the docstrings of functions and classes."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite a docstring, once its object is whole."""
        if obj.docstring is None:
            return
        names: set[str] = set()
        if isinstance(obj, Function):
            names = {parameter.name for parameter in obj.parameters}
        elif isinstance(obj, Class):
            init = obj.members.get("__init__")
            names = {*obj.members, *(p.name for p in getattr(init, "parameters", ()))}
        if names:
            obj.docstring.value = as_list(obj.docstring.value, names)


def as_list(text: str, names: set[str]) -> str:
    """Return a docstring with an item of a list for each description of these names."""
    first, gap, rest = text.partition("\n\n")
    either = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    item = re.compile(rf"{_BEGINNING}((?:{either})(?:,\s(?:{either}))*): ", re.MULTILINE)

    def begun(match: re.Match[str]) -> str:
        return "\n\n- " + ", ".join(f"`{name.strip()}`" for name in match[1].split(",")) + ": "

    return first + gap + _RESULT.sub("\n\n", item.sub(begun, rest))
