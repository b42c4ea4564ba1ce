"""A Jinja sandbox whose templates end soon and make little, whoever wrote them.

A template of three lines could otherwise loop for ever, or make gigabytes. Every loop, call,
filter, comparison and operator is counted while a template runs: the processor's time, and the
characters and items that were made. What one operation would make is counted before it does.
Jinja's names of which no chat template is known to make use are left out.
Source: transformers utils/chat_template_utils.py, for the names that a template may use.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes, pass_environment
from jinja2.environment import Environment
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_S = 1.0  # time of a core for one rendering, beside that for what is given
_S_PER_GIVEN = 1e-6  # several times what a long conversation takes
_COUNTS_A_LOOK = 8  # looks at the clock are most of what counting takes
_MOST_MADE = 1 << 23  # characters and items that are made, beside those for each given one
_MADE_PER_GIVEN = 16
_MOST_BITS = 1 << 12  # bits of an integer
_MOST_INDENT = 64
_MOST_SOURCE = 1 << 16  # characters of a template: the longest known ones have 30,000
# Methods of text whose result is no longer than the text. `join` and `replace` are counted apart.
_TEXT_METHODS = frozenset(
    (
        *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
        *("isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle"),
        *("isupper", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rfind"),
        *("rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith"),
        *("strip", "swapcase", "title", "upper"),
    )
)
_TEXT_FILTERS = (
    *("capitalize", "e", "escape", "float", "int", "lower", "safe", "string", "title", "trim"),
    "upper",
)
_OTHER_FILTERS = (
    *("abs", "attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last"),
    *("length", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select"),
    *("selectattr", "sort", "unique"),
)
# Names of filters that no template can spell.
_MADE, _STEPS, _CONCAT = "(made)", "(steps)", "(concat)"


class _Count:
    """Time and memory that a rendering has left."""

    def __init__(self, given: int):
        self._left = _MOST_MADE + _MADE_PER_GIVEN * given
        self._end_s = time.thread_time() + MOST_S + _S_PER_GIVEN * given
        self._counts = 0

    def add(self, made: int) -> None:
        """Count characters or items. Raises TemplateError beyond a limit of them or of time."""
        self._left -= made
        if self._left < 0:
            raise TemplateError("it makes too long texts or lists")
        self._counts += 1
        if self._counts % _COUNTS_A_LOOK == 0 and time.thread_time() > self._end_s:
            raise TemplateError(f"it takes more than {MOST_S:g} s")


_count: ContextVar[_Count] = ContextVar("_count")


def _add(made: int) -> None:
    """Count in the rendering that runs.

    Raises TemplateError, also where none runs: Jinja tries to compute constants while it compiles,
    and leaves them to the rendering if that fails.
    """
    count = _count.get(None)
    if count is None:
        raise TemplateError("nothing is computed before a rendering")
    count.add(made)


def compile_template(source: str) -> Template:
    """Compile a template. Raises TemplateError, and errors of Python's compiler."""
    if len(source) > _MOST_SOURCE:
        raise TemplateError(f"it has {len(source)} characters, and {_MOST_SOURCE} is the most")
    return _Environment().from_string(source)


def render(template: Template, **variables: Any) -> str:
    """Render a template of compile_template.

    Raises TemplateError for one that takes too long or makes too much, and whatever other error a
    template causes.
    """
    token = _count.set(_Count(_size(variables)))
    try:
        return _join("", template.root_render_func(template.new_context(variables)))
    finally:
        _count.reset(token)


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox that counts what its templates do."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=_shown,
        )
        texts = {name: _of_text(self.filters[name]) for name in _TEXT_FILTERS}
        others = {name: self.filters[name] for name in _OTHER_FILTERS}
        own = {"tojson": _to_json, "join": _join_filter, "replace": _replace, "indent": _indent}
        self.filters = {n: _counted(f) for n, f in (texts | others | own).items()}
        self.filters |= {_MADE: _made, _STEPS: _steps, _CONCAT: _concat}
        self.globals = {
            "range": self.globals["range"],  # makes 100,000 numbers at most
            "dict": _new_dict,
            "namespace": _PublicNamespace,
            "raise_exception": _raise,
            "strftime_now": _strftime_now,
        }

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # joins macros, and blocks of set, call and filter
        return _join("", parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _with_counts(template).set_environment(self)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _add(_made_by(operator, left, right))
        return _made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        of = getattr(called, "__wrapped__", called)  # Jinja wraps `format`
        owner, name = getattr(of, "__self__", None), getattr(of, "__name__", "")
        if isinstance(owner, str) and name in ("join", "replace"):
            _add(1)
            return (_join if name == "join" else _replace)(owner, *args, **kwargs)
        if isinstance(owner, str | bytes | int | float) and name not in _TEXT_METHODS:
            raise TemplateError(f"the method {name} of texts and numbers is not served")
        _add(1)
        return _made(super().call(context, called, *args, **kwargs))


def _with_counts(node: nodes.Node) -> nodes.Node:
    """Put counting filters around what Jinja compiles to plain Python."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _with_counts(value))
        elif isinstance(value, list):
            inner = [_with_counts(v) if isinstance(v, nodes.Node) else v for v in value]
            setattr(node, name, inner)
    match node:
        case nodes.For():
            node.iter = _filter(node.iter, _STEPS)
        case nodes.Concat():
            return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)
        case nodes.Getitem(arg=nodes.Slice()) | nodes.Tuple(ctx="load"):
            return _filter(node, _MADE)
        case nodes.List() | nodes.Dict() | nodes.Compare() | nodes.Test():
            return _filter(node, _MADE)
    return node


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _PublicNamespace(Namespace):
    """Namespace whose attributes a template may set, except private ones."""

    def __init__(self, *given: Any, **attributes: Any):
        super().__init__()
        for name, value in dict(*given, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError(f"a chat template may not set the private attribute {name}")
        super().__setitem__(name, value)


def _size(value: Any) -> int:
    """Count the characters and items of nested values."""
    if isinstance(value, str):
        return 1 + len(value)
    if isinstance(value, Mapping):
        return 1 + sum(map(_size, value)) + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list | tuple) else 1


def _add_nested(value: Any, characters: bool) -> None:
    """Count the items of nested values, and the characters of their texts.

    One that is in several places counts as often: its text is as long, and it is compared so often.
    """
    if isinstance(value, str):
        _add(1 + len(value) * characters)
    elif isinstance(value, dict | list | tuple | set):
        _add(1 + len(value))
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            if isinstance(inner, str | dict | list | tuple | set):
                _add_nested(inner, characters)


def _made(value: Any) -> Any:
    """Count a value, and return it. Raises TemplateError for a very long number."""
    if isinstance(value, str):
        _add(1 + len(value))
    else:
        _add(1)
        _add_nested(value, characters=False)
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise TemplateError("it makes too long numbers")
    return value


def _shown(value: Any) -> Any:
    """Count a value's text before Jinja makes it."""
    if _count.get(None) is not None:
        _add_nested(value, characters=True)
    return value


def _steps(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _add(1)
        yield value


def _made_by(operator: str, left: Any, right: Any) -> int:
    """Return how much an operator would make. Raises TemplateError for a very long number."""
    sizes = [len(v) if isinstance(v, str | bytes | list | tuple) else None for v in (left, right)]
    if operator == "%" and sizes[0] is not None:
        raise TemplateError("the operator % of texts is not served")
    if operator == "+":
        return sum(size or 0 for size in sizes)
    if operator == "*" and sizes != [None, None]:
        size, count = (sizes[0], right) if sizes[0] is not None else (sizes[1], left)
        return (size or 0) * count if isinstance(count, int) and count > 0 else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = abs(right) if operator == "**" else 1
        if operator in ("*", "**") and left.bit_length() * bits > _MOST_BITS:
            raise TemplateError("it makes too long numbers")
    return 0


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # also copies the mark by which Jinja passes its environment
    def counted(*args: Any, **kwargs: Any) -> Any:
        _add(1)
        return _made(function(*args, **kwargs))

    return counted


def _of_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts the text of its input before it makes that."""

    @wraps(function)
    def of_text(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            _shown(value)
        return function(*args, **kwargs)

    return of_text


def _join(separator: str, parts: Iterable[Any]) -> str:
    """Join texts; a list of them is made first, as Python does."""
    found = []
    for part in parts:
        _add(1 + len(separator) + (len(part) if isinstance(part, str) else 0))
        found.append(part)
    return separator.join(found)


def _concat(parts: list[Any]) -> str:
    for part in parts:
        _shown(part)
    return "".join(map(str, parts))


@pass_environment
def _join_filter(
    environment: Environment, parts: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    if attribute is not None:
        parts = map(make_attrgetter(environment, attribute), parts)
    return _join(str(d), (str(_made(_shown(part))) for part in parts))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    given = str(_shown(text))
    found = given.count(old)
    _add(len(given) + found * len(new))
    return given.replace(old, new, count)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * min(width, _MOST_INDENT + 1)
    if len(space) > _MOST_INDENT:
        raise TemplateError(f"it indents by more than {_MOST_INDENT} characters")
    given = str(_shown(text))
    _add(len(given) + (1 + given.count("\n")) * len(space))
    head, *lines = given.splitlines() or [""]
    shown = [space + head if first else head]
    shown += [space + line if line or blank else line for line in lines]
    return "\n".join(shown)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    if isinstance(indent, int) and indent > _MOST_INDENT:
        raise TemplateError(f"it indents by more than {_MOST_INDENT} characters")
    _shown(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _new_dict(*given: Any, **items: Any) -> dict[Any, Any]:
    """Make a dict for a template, which does not get the class `dict` itself."""
    return dict(*given, **items)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
