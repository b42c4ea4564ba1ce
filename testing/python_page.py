"""The blocks of docs/python.md: the signature and the docstring of each public name."""

import ast
import inspect
import re
import textwrap
from pkgutil import resolve_name
from typing import Any

from testing.imports import ROOT

DOCUMENT = "docs/python.md"


def names() -> list[str]:
    """Return the names of the page's blocks, such as api.Qwen3Omni.load."""
    return re.findall(r"<!-- generated: (\S+) -->", (ROOT / DOCUMENT).read_text(encoding="utf-8"))


def block(name: str) -> str:
    """Write what the page says of a function, a property or a class, or of a module's errors."""
    found = resolve_name(f"qwen3_omni_neuron.{name}")
    if inspect.ismodule(found):
        made = [one for one in vars(found).values() if inspect.isclass(one)]
        errors = [one for one in made if issubclass(one, Exception)]
        lines = [f"- `{one.__name__}`: {' '.join((one.__doc__ or '').split())}" for one in errors]
        return "\n".join((*lines, ""))
    function = getattr(found, "fget", getattr(found, "func", found))  # a property's
    shown = function.__qualname__
    lines = [f"{'####' if '.' in shown else '###'} `{shown}`"]
    if signature := _signature(found, function):
        lines += [
            "```py",
            textwrap.fill(shown + signature, 100, subsequent_indent="    "),
            "```",
            "",
        ]
    told = (inspect.getdoc(found) or "").partition("\n\nOptions:\n")[0]  # a table has the options
    return "\n".join((*lines, told, ""))


def _signature(found: Any, function: Any) -> str:
    """Write annotations as the source has them; "" for a class that is not a dataclass."""
    node: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if isinstance(node, ast.ClassDef):
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        kinds = (f"{ast.unparse(one.target)}: {ast.unparse(one.annotation)}" for one in fields)
        return f"({', '.join(kinds)})" if hasattr(found, "__dataclass_fields__") else ""
    node.args.args = [one for one in node.args.args if one.arg not in ("self", "cls")]
    arguments = f"({ast.unparse(node.args)}) ->" if function is found else ":"
    return re.sub("'(.*?)'", r"\1", f"{arguments} {ast.unparse(node.returns)}")
