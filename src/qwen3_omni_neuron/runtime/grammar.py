"""Grammars of replies: compiled before the reply, then a token mask per step.

Grammars are hostile input: bounded here, and run in child processes.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from qwen3_omni_neuron.engines.sampling import Mask
from qwen3_omni_neuron.errors import (
    GrammarError,
    NotInstalledError,
    OptionError,
    format_value,
    printable,
)
from qwen3_omni_neuron.helpers.grammars import Admit, CompiledGrammar, GrammarPool, admit_all, wait
from qwen3_omni_neuron.options import PreparedGrammar, RequestOptions, ToolChoice
from qwen3_omni_neuron.runtime.stop_strings import (
    CALL,
    END_OF_CALL,
    END_OF_THOUGHT,
    Decode,
    Encode,
    Marker,
    TextCodec,
)

MOST_ERROR_CHARACTERS = 400
MOST_CHARACTERS = 1 << 18  # of all schemas of a request
MOST_DEPTH = 64  # of nested lists and objects in a schema
# Compile time grows with the square of optional properties: 40 ms for 300, 0.3 s for 1000.
MOST_OPTIONAL = 500
# OpenAI's limits.
MOST_PROPERTIES = 5000
MOST_NESTED = 10
MOST_ENUM_VALUES = 1000
MOST_NAME_CHARACTERS = 120_000
_REFUSED = ("allOf", "not", "dependentRequired", "dependentSchemas", "if", "then", "else")
_TOGETHER = frozenset(("anyOf", "oneOf", "$ref"))  # may describe one object with `properties`
# These may define keys beyond `properties`.
_FURTHER = _TOGETHER | {"additionalProperties", "unevaluatedProperties", "allOf", "if"}
_FURTHER |= {"dependentSchemas", "minProperties", "enum", "const"}
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = r"(..:..:[0-5]|23:59:60(\.[0-9]+)?([Zz]|[+-]00:00))"  # leap seconds: midnight UTC
_FORMATS = {"date": f"^{_DATE}", "time": f"^{_TIME}", "date-time": f"^{_DATE}.*[Tt]{_TIME}"}
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_OBJECTS = ("properties", "$defs", "definitions", "patternProperties")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
# As Qwen's chat templates write it; flexible white space could be endless.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# Lark's strings, comments and regular expressions, as llguidance reads them.
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/', re.DOTALL)
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_LARK_TOKEN = re.compile(r"<[^<>\s]+>")
Json = dict[str, Any]


class Vocabulary(TextCodec, Protocol):
    """A checkpoint's tokenizer, as grammars use it."""

    @property
    def thinks(self) -> bool:
        """True if replies begin with reasoning."""
        ...

    @property
    def added_tokens(self) -> Sequence[str]:
        """Special tokens' texts."""
        ...

    def tokenizer_json(self) -> str:
        """Return the tokenizer in `tokenizers` format."""
        ...


@dataclass(frozen=True)
class Grammar(PreparedGrammar):
    """Compiled grammar of one request's reply.

    vocab_size: number of logits. after: the text is free up to these strings, in order; then the
    grammar applies. repeats: then it is free up to the last string again; else the reply ends.
    """

    compiled: CompiledGrammar
    vocab_size: int
    after: tuple[str, ...]
    repeats: bool
    decode: Decode
    encode: Encode

    def begin(self, eos_ids: frozenset[int], limit: int) -> "GrammarState":
        """Return a new reply's state. limit: of its tokens."""
        return GrammarState(self, eos_ids, limit)


class GrammarState:
    """Position of one reply in its grammar. After `push`, `wait_for_masks` gets its mask."""

    def __init__(self, grammar: Grammar, eos_ids: frozenset[int], limit: int):
        self._grammar, self._matcher, self._left = grammar, grammar.compiled, limit
        ends = np.zeros(32 * len(self._matcher.ends), np.uint8)
        ends[[i for i in eos_ids if i < grammar.vocab_size]] = 1
        self._matcher.ends[:] = np.packbits(ends, bitorder="little").view(np.uint32)
        self._waits = list(grammar.after)
        self._marker: Marker | None = None
        self._wait([])

    @property
    def pending(self) -> bool:
        """True while its mask is being computed."""
        return self._marker is None and self._matcher.pending

    @property
    def ended(self) -> bool:
        """True if the reply must end here. Not valid while `pending`."""
        return self._marker is None and self._matcher.stopped

    @property
    def closed(self) -> bool:
        """True if the limit has made the grammar end."""
        return self._matcher.closed

    @property
    def mask(self) -> Mask | None:
        """The next token's mask, see `engines.sampling.Sampler`; None allows all."""
        return None if self._marker is not None else self._matcher.mask

    @property
    def error(self) -> GrammarError | None:
        """Why the reply can't continue. Not valid while `pending`."""
        if self._marker is not None or self._matcher.failure is None:
            return None
        reason = printable(self._matcher.failure, MOST_ERROR_CHARACTERS)
        return GrammarError(
            f"the reply can't continue within its grammar: {reason}. Simplify the grammar or "
            "schema."
        )

    def push(self, token_id: int) -> None:
        """Add a token that does not end the reply."""
        self._left -= 1
        if self._marker is None:
            self._matcher.push(token_id, self._left)
            return
        rest = self._marker.push(token_id)
        if rest is not None:
            self._wait(self._grammar.encode(rest) if rest else [])

    def close(self) -> None:
        """Free the state."""
        self._matcher.close()

    def settle(self) -> None:
        """Wait for the marker that repeats an ended grammar."""
        if self._grammar.repeats and not self.pending and self.ended:
            self._waits = list(self._grammar.after[-1:])
            self._wait([])

    def _wait(self, token_ids: list[int]) -> None:
        self._marker = None
        if self._waits:
            self._marker = Marker(self._waits.pop(0), self._grammar.decode)
        else:
            self._matcher.begin(token_ids, self._left)


class ForcedTokens(PreparedGrammar):
    """First tokens of a reply, such as a prompt that needs log-probabilities.

    Both a grammar and its state; see `GrammarState`.
    """

    pending = ended = closed = False
    error = None

    def __init__(self, token_ids: Sequence[int], vocab_size: int):
        self._left, self._vocab_size = list(token_ids), vocab_size

    def begin(self, eos_ids: frozenset[int], limit: int) -> "ForcedTokens":
        """Return the state of a new reply."""
        return ForcedTokens(self._left, self._vocab_size)

    @property
    def mask(self) -> Mask | None:
        """Only the next forced token; None after the last one."""
        mask = np.zeros((self._vocab_size + 31) // 32, np.uint32)
        for token_id in self._left[:1]:
            mask[token_id // 32] = 1 << token_id % 32
        return mask if self._left else None

    def push(self, token_id: int) -> None:
        """Add a token."""
        del self._left[:1]

    def close(self) -> None:
        """It has nothing to free."""


def wait_for_masks(states: Sequence[GrammarState | ForcedTokens], most_s: float) -> None:
    """Get the masks of states, waiting at most `most_s` seconds."""
    compiled = [state for state in states if isinstance(state, GrammarState)]
    wait([state._matcher for state in compiled if state.pending], most_s)
    for state in compiled:
        state.settle()


class Grammars:
    """Thread-safe compiler of grammars for one checkpoint."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, end_id: int):
        """vocab_size: number of logits. end_id: ends a turn."""
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._pool = GrammarPool(vocabulary.tokenizer_json, vocab_size, end_id)

    def compile(self, options: RequestOptions) -> Grammar | ForcedTokens | None:
        """Compile a request's grammar; None for a free reply.

        Raises OptionError for an invalid grammar, schema or choice of tools, BusyError,
        ClosedError, and NotInstalledError.
        """
        if isinstance(options.grammar, Grammar | ForcedTokens):
            return options.grammar
        begun = self.begin(options)
        if begun is None:
            return None
        try:
            return begun.result()
        except BaseException:
            begun.cancel()
            raise

    def begin(self, options: RequestOptions, admit: Admit = admit_all) -> "Future[Grammar] | None":
        """Start `compile`. Cancelling the future ends the work.

        admit: called with the grammar's bytes, in another thread; raises if they don't fit.
        """
        choice = options.choice
        given = None if choice.required else options.grammar
        assert not isinstance(given, PreparedGrammar)
        if not choice.functions and given is None:
            return None
        # The grammar covers only a call, after its <tool_call>.
        free = given is None and not choice.required
        if not _has_guidance():
            if free and not any(map(_is_strict, choice.functions)):
                return None  # CallWatch checks complete calls
            raise NotInstalledError(
                "grammar, tool_choice and strict tools need llguidance, which is not installed: "
                'pip install "qwen3-omni-neuron[serve]".'
            )
        _check_schemas(given or {}, choice.functions)
        body = {} if given is None else _body(given)
        rules = self._rules(body, choice, free)
        # If llguidance refuses a lenient schema, accept any object instead.
        first = len(rules) - len(choice.functions)
        less = {"json_schema": _styled(_ANY_OBJECT)}
        lenient = [
            (first + number, less)
            for number, function in enumerate(choice.functions)
            if not _is_strict(function)
        ]
        after = (END_OF_THOUGHT,) if self._vocabulary.thinks else ()

        def make(compiled: CompiledGrammar) -> Grammar:
            return Grammar(
                compiled,
                self._vocab_size,
                (*after, CALL) if free else after,
                free and choice.several,
                self._vocabulary.decode,
                self._vocabulary.encode_exactly,
            )

        owner = options.owner or ""
        return self._pool.compile({"rules": rules, "else": lenient}, make, owner, admit)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def _rules(self, body: Json, choice: ToolChoice, free: bool) -> list[Json]:
        call = f"{self._marker(CALL)} rest"
        replies = ["@body"] if body else []
        if choice.functions and not free:
            replies.append(call + (rf' ("\n" {call})*' if choice.several else ""))
        start = "rest" if free else " | ".join(replies)
        # Templates write blank lines after reasoning.
        blank = r"/\n{0,2}/ " if self._vocabulary.thinks and not free else ""
        lark = [f"start: {blank}({start})"]
        if choice.functions:
            calls = []
            for number, function in enumerate(choice.functions):
                name = json.dumps(function["name"], ensure_ascii=False)
                before = json.dumps(f'{{"name": {name}, "arguments": ')
                calls.append(f'{before} @arguments{number} "}}"')
            end = self._marker(END_OF_CALL)
            lark.append(rf'rest: "\n" ({" | ".join(calls)}) "\n" {end}')
        rules: list[Json] = [{"name": "reply", "lark_grammar": "\n".join(lark)}]
        rules += [{**body, "name": "body"}] if body else []
        for number, function in enumerate(choice.functions):
            schema = _styled(_arguments(function), lenient=not _is_strict(function))
            rules.append({"name": f"arguments{number}", "json_schema": schema})
        return rules

    def _marker(self, name: str) -> str:
        return name if name in self._vocabulary.added_tokens else json.dumps(name)


def check_bounds(schemas: Mapping[str, Any]) -> None:
    """Raise OptionError for schemas, by name, that are too large to compile."""
    size = properties = optional = 0
    for where, schema in schemas.items():
        if not isinstance(schema, Mapping):
            raise OptionError(
                f"{where} must be a JSON schema, an object, got {format_value(schema)}."
            )
        _check_depth(schema, where)
        try:
            text = json.dumps(schema, ensure_ascii=False)
            text.encode()  # lone surrogates fail
            size += len(text)
        except (TypeError, ValueError) as error:
            raise OptionError(f"{where} can't be written as JSON: {error}.") from None
        for one, _ in _schemas(schema):
            names, required = one.get("properties"), one.get("required")
            if isinstance(names, Mapping):
                needed = set(map(str, required)) if isinstance(required, list | tuple) else set()
                properties += len(names)
                optional += len(set(names) - needed)
    for count, most, kind in (
        (size, MOST_CHARACTERS, "characters"),
        (properties, MOST_PROPERTIES, "properties"),
        (optional, MOST_OPTIONAL, "properties that are not required"),
    ):
        if count > most:
            names = ", ".join(schemas) if len(schemas) < 4 else f"{len(schemas)} schemas"
            raise OptionError(f"{names}: {count} {kind}, more than the limit of {most}.")


def check_strict(schema: Mapping[str, Any], where: str) -> None:
    """Raise OptionError for the first breach of OpenAI's rules for strict schemas.

    Source: OpenAI's guide to structured outputs, "Supported schemas".
    """
    values = characters = 0
    breach = None
    if schema.get("type") != "object" or "anyOf" in schema:
        breach = "its root must be of type object, without anyOf"
    for one, depth in _schemas(schema):
        if depth > MOST_NESTED:
            breach = breach or f"its objects are nested deeper than {MOST_NESTED} levels"
        breach = breach or _breach(one)
        enum, names = one.get("enum"), [one.get("const")]
        if isinstance(enum, list | tuple):
            values += len(enum)
            names += enum
        for key in ("properties", "$defs"):
            names += one[key] if isinstance(one.get(key), Mapping) else ()
        characters += sum(len(name) for name in names if isinstance(name, str))
    for count, most, kind in (
        (values, MOST_ENUM_VALUES, "values of enums"),
        (characters, MOST_NAME_CHARACTERS, "characters in its names and values"),
    ):
        if count > most:
            breach = breach or f"it has {count} {kind}, more than {most}"
    if breach is not None:
        raise OptionError(f"{where}: the schema is strict, and {breach}.")


def _breach(one: Mapping[str, Any]) -> str | None:
    for name in _REFUSED:
        if name in one:
            return f"{name} is not supported in strict schemas"
    if "properties" not in one and one.get("type") != "object":
        return None
    names, required = one.get("properties", {}), one.get("required", [])
    if not isinstance(names, Mapping) or not isinstance(required, list | tuple):
        return "properties must be an object and required a list"
    if one.get("additionalProperties") is not False:
        return "every object in it needs additionalProperties: false"
    missing = [name for name in names if name not in required]
    if missing:
        return (
            f"required must name every property, and lacks {format_value(missing[0])} (an optional "
            "one may be null)"
        )
    return None


def _check_depth(schema: Mapping[str, Any], where: str) -> None:
    level: list[Any] = [schema]
    for _ in range(MOST_DEPTH):
        inner = [v for one in level for v in (one.values() if isinstance(one, Mapping) else one)]
        level = [value for value in inner if isinstance(value, Mapping | list | tuple)]
        if not level or len(level) > MOST_CHARACTERS:
            break
    if level:
        raise OptionError(f"{where} is nested deeper than {MOST_DEPTH} lists and objects.")


def _schemas(schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield a schema and all schemas in it, with their object depth, without recursion.

    References are not followed.
    """
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        one, depth = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        yield one, depth
        inner = depth + ("properties" in one)
        for name in _OBJECTS:
            if isinstance(one.get(name), Mapping):
                at = depth if name in ("$defs", "definitions") else inner
                waiting += [(value, at) for value in one[name].values()]
        for name in (*_LISTS, *_SINGLE):
            value = one.get(name)
            waiting += [(v, depth) for v in (value if isinstance(value, list | tuple) else [value])]


def _check_schemas(given: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> None:
    schemas = {
        f"the parameters of tool {number} ({printable(function['name'], 64)})": function
        for number, function in enumerate(functions)
    }
    checked = {where: _parameters(function) for where, function in schemas.items()}
    strict = [where for where, function in schemas.items() if _is_strict(function)]
    if "json" in given:
        checked["grammar.json"] = given["json"]
        strict += ["grammar.json"] if given.get("strict") else []
    check_bounds(checked)
    for where in strict:
        check_strict(checked[where], where)


def _body(given: Mapping[str, Any]) -> Json:
    if "json" in given:
        return {"json_schema": _styled(given["json"])}
    ((kind, text),) = given.items()
    if len(text) > MOST_CHARACTERS:
        raise OptionError(
            f"the grammar has {len(text)} characters, more than the limit of {MOST_CHARACTERS}."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"the grammar can't be encoded: {error}.") from None
    if kind == "regex":
        return {"regex": text}
    if _GBNF.search(text):
        return {"gbnf": text}
    special = _LARK_TOKEN.search(_LARK_TEXT.sub(" ", text))
    if special is not None:
        name = printable(special[0], 64)
        raise OptionError(
            f"grammar names the special token {name}, and a reply is text. Leave it out, or write "
            f'it in quotes for its characters: "{name}".'
        )
    return {"lark_grammar": text}


def _parameters(function: Mapping[str, Any]) -> Any:
    given = function.get("parameters")
    return _ANY_OBJECT if given is None else given


def _arguments(function: Mapping[str, Any]) -> Json:
    schema = {**(function.get("parameters") or {}), "type": "object"}
    # Several schemas that describe one object can't each exclude further keys.
    divided = any(
        "allOf" in one or ("properties" in one and not _TOGETHER.isdisjoint(one))
        for one, _ in _schemas(schema)
    )
    return _closed({"properties": {}} | (schema if divided else _changed(schema, _each_closed)))


def _each_closed(schema: Mapping[str, Any]) -> Json:
    return _closed(_changed(schema, _each_closed))


def _closed(schema: Json) -> Json:
    """Return a schema that rejects further keys, if it names some."""
    names, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(names, Mapping) or not isinstance(required, list | tuple):
        return schema
    whole = _FURTHER.isdisjoint(schema) and set(map(str, required)) <= set(names)
    return schema | {"additionalProperties": False} if whole else schema


def _changed(schema: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Json]) -> Json:
    def one(value: Any) -> Any:
        return change(value) if isinstance(value, Mapping) else value

    made = dict(schema)
    for name, value in schema.items():
        if name in _OBJECTS and isinstance(value, Mapping):
            made[name] = {key: one(inner) for key, inner in value.items()}
        elif name in (*_LISTS, *_SINGLE):
            listed = isinstance(value, list | tuple)
            made[name] = list(map(one, value)) if listed else one(value)
    return made


def _real(schema: Mapping[str, Any]) -> Json:
    """Return a schema that rejects impossible dates, such as 29 February 2025."""
    made, form = _changed(schema, _real), schema.get("format")
    pattern = _FORMATS.get(form) if isinstance(form, str) else None
    given = made.get("allOf", [])
    if pattern is not None and isinstance(given, list):
        made["allOf"] = [*given, {"pattern": pattern}]
    return made


def _is_strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


def _styled(schema: Mapping[str, Any], lenient: bool = False) -> Json:
    return {**_real(schema), "x-guidance": {**_STYLE, "lenient": lenient}}


def _has_guidance() -> bool:
    try:
        return importlib.util.find_spec("llguidance") is not None
    except ValueError:  # it can't be imported
        return False
