"""Grammars of replies: compiled before a reply begins, then a mask of tokens for each step.

llguidance parses the grammar and makes the masks. What it is given may come from strangers, so its
input, its grammar and the work of each step are bounded.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from qwen3_omni_neuron.engines.sampling import Mask
from qwen3_omni_neuron.errors import GrammarError, NotInstalledError, OptionError, printable
from qwen3_omni_neuron.options import RequestOptions, ToolChoice
from qwen3_omni_neuron.runtime.json_schema import MOST_CHARACTERS, check_bounds, check_strict
from qwen3_omni_neuron.runtime.stop_strings import Decode, Encode, Marker
from qwen3_omni_neuron.runtime.tool_calls import CALL, END_OF_CALL, END_OF_THOUGHT

MOST_ERROR_CHARACTERS = 400
# llguidance does about 50,000 units of lexer fuel, or 20,000 items, in a millisecond, and a state
# takes 1 to 2 kB. With these the costliest grammar that we found took 10 ms for a mask.
LIMITS = {
    "max_items_in_row": 200,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 30_000,
    "step_max_items": 5_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,  # they would quote the whole grammar
}
# JSON as Qwen's chat templates write it; flexible white space could go on without end.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
Json = dict[str, Any]


class Vocabulary(Protocol):
    """A checkpoint's tokenizer, as grammars use it; see prompt.template.Conversation."""

    @property
    def thinks(self) -> bool:
        """True if replies begin with reasoning."""
        ...

    @property
    def added_tokens(self) -> Sequence[str]:
        """Texts of the tokens beyond the vocabulary of words."""
        ...

    def tokenizer_json(self) -> str:
        """Return the tokenizer in the format of the library `tokenizers`."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of generated tokens, without special tokens."""
        ...

    def encode_words(self, text: str) -> list[int]:
        """Return the token ids of a text, in which names of special tokens are words."""
        ...


@dataclass(frozen=True)
class Grammar:
    """Compiled grammar of one request's reply.

    matcher: llguidance's, at the grammar's beginning. after: strings that the reply writes freely,
    in this order, before the grammar holds; where `repeats`, it holds again whenever the last of
    them was written again, else the reply ends with it. end_id: llguidance's token for the end.
    """

    matcher: Any
    vocab_size: int
    end_id: int
    after: tuple[str, ...]
    repeats: bool
    decode: Decode
    encode: Encode

    def begin(self, eos_ids: frozenset[int]) -> "GrammarState":
        """Return the state of a reply that begins. eos_ids: tokens that end it."""
        return GrammarState(self, eos_ids)


class GrammarState:
    """Position of one reply in its grammar.

    mask: see `engines.sampling.Sampler`; valid after `prepare`. None: every token is allowed.
    error: why no mask could be made, None where one was.
    """

    def __init__(self, grammar: Grammar, eos_ids: frozenset[int]):
        self._grammar = grammar
        self._bits: Mask = np.zeros((grammar.vocab_size + 31) // 32, np.uint32)
        self._eos_ids = [i for i in eos_ids if i < grammar.vocab_size]
        self._waits = list(grammar.after)
        self._matcher: Any = None
        self._marker: Marker | None = None
        self._stale = True
        self.mask: Mask | None = None
        self.error: GrammarError | None = None
        self._wait()

    def push(self, token_id: int) -> bool:
        """Add a token that does not end the reply. Returns whether the grammar ends the reply.

        Raises GrammarError.
        """
        token_ids = [token_id]
        if self._marker is not None:
            rest = self._marker.push(token_id)
            if rest is None:
                return False
            self._wait()
            if self._matcher is None:
                return False
            token_ids = self._grammar.encode(rest) if rest else []
        self._stale = True
        if token_ids and not self._matcher.consume_tokens(token_ids):
            raise self._failure()
        if not self._matcher.is_stopped():
            return False
        if self._grammar.repeats:
            self._waits = list(self._grammar.after[-1:])
            self._wait()
        return not self._grammar.repeats

    def prepare(self) -> None:
        """Compute the mask of the next token, if that is not done yet. Any thread may call it."""
        if not self._stale or self._matcher is None:
            return
        bits = self._bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        # Where the grammar may end, the tokens that end this reply are allowed, and no others.
        for token_id in (self._grammar.end_id, *self._eos_ids):
            bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if self._matcher.is_accepting():
            for token_id in self._eos_ids:
                bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        if self._matcher.is_error() or not bits.any():
            self.error = self._failure()
        self.mask, self._stale = bits, False

    def _wait(self) -> None:
        """Wait for the next of the strings after which the grammar holds, or begin with it."""
        self._marker = self._matcher = self.mask = None
        if self._waits:
            self._marker = Marker(self._waits.pop(0), self._grammar.decode)
        else:
            self._matcher, self._stale = self._grammar.matcher.deep_copy(), True

    def _failure(self) -> GrammarError:
        reason = printable(self._matcher.get_error(), MOST_ERROR_CHARACTERS)
        return GrammarError(
            f"the reply can't go on within its grammar: {reason or 'no token is allowed'}. Take a "
            "simpler grammar or schema."
        )


class MaskThread:
    """Thread that makes the masks of the next tokens while the engine computes the step."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, states: Sequence[GrammarState]) -> Callable[[], None]:
        """Begin to make masks. Returns a function that waits for them."""
        if not states:
            return _nothing
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "qwen3-omni-masks")
        future: Future[None] = self._pool.submit(_prepare, states)
        return future.result

    def close(self) -> None:
        """End the thread after its present work."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _nothing() -> None:
    pass


def _prepare(states: Sequence[GrammarState]) -> None:
    for state in states:
        state.prepare()


class Grammars:
    """Compiler of grammars for one checkpoint's vocabulary. Several threads may use it."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, end_id: int):
        """vocab_size: number of logits. end_id: token that ends a turn."""
        self._vocabulary, self._vocab_size, self._end_id = vocabulary, vocab_size, end_id
        self._lock = threading.Lock()
        self._made: Any = None  # llguidance's tokenizer: takes about a second for 150,000 tokens

    def compile(self, options: RequestOptions) -> Grammar | None:
        """Compile what a request asks for; None where its reply is free.

        Raises OptionError for a grammar, a schema or a choice of tools that can't be used, and
        NotInstalledError.
        """
        choice = options.choice
        given = None if choice.required else options.grammar
        if not choice.functions and given is None:
            return None
        # Whether the grammar holds a call alone, after the <tool_call> that begins it.
        free = given is None and not choice.required
        guidance = _import_guidance()
        if guidance is None:
            if free and not any(map(_is_strict, choice.functions)):
                return None  # runtime.tool_calls.CallWatch checks complete calls
            raise NotInstalledError(
                "grammar, tool_choice and strict tools need llguidance, which is not installed: "
                'pip install "qwen3-omni-neuron[serve]".'
            )
        _check_schemas(given or {}, choice.functions)
        body = {} if given is None else _body(guidance, given)
        rules = self._rules(body, choice, free)
        matcher = self._matcher(guidance, rules)
        if matcher.is_error():
            # Schemas that are not strict and that llguidance does not take hold to any object.
            schemas = rules[len(rules) - len(choice.functions) :]
            for rule, function in zip(schemas, choice.functions, strict=True):
                if not _is_strict(function) and self._matcher(guidance, [rule]).is_error():
                    rule["json_schema"] = _styled(_ANY_OBJECT)
            matcher = self._matcher(guidance, rules)
        if matcher.is_error():
            reason = printable(matcher.get_error(), MOST_ERROR_CHARACTERS)
            raise OptionError(
                f"the grammar or schema can't be used: {reason}. Take a simpler one, or without "
                "what is not supported."
            )
        after = (END_OF_THOUGHT,) if self._vocabulary.thinks else ()
        return Grammar(
            matcher,
            self._vocab_size,
            self._end_id,
            (*after, CALL) if free else after,
            free and choice.several,
            self._vocabulary.decode,
            self._vocabulary.encode_words,
        )

    def _rules(self, body: Json, choice: ToolChoice, free: bool) -> list[Json]:
        """Return grammars in llguidance's format: the main one, the body's, one a function."""
        call = f"{self._marker(CALL)} rest"
        replies = ["@body"] if body else []
        if choice.functions and not free:
            replies.append(call + (rf' ("\n" {call})*' if choice.several else ""))
        start = "rest" if free else " | ".join(replies)
        # In templates, blank lines separate the answer from reasoning before it.
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
            schema = _styled(_parameters(function), lenient=not _is_strict(function))
            rules.append({"name": f"arguments{number}", "json_schema": schema})
        return rules

    def _matcher(self, guidance: Any, rules: Sequence[Json]) -> Any:
        return guidance.LLMatcher(
            self._tokenizer(guidance),
            json.dumps({"grammars": rules}),
            log_level=0,
            limits=guidance.LLParserLimits(**LIMITS),
        )

    def _marker(self, name: str) -> str:
        """Return a marker in Lark: a token of its own where the vocabulary has it."""
        return name if name in self._vocabulary.added_tokens else json.dumps(name)

    def _tokenizer(self, guidance: Any) -> Any:
        with self._lock:
            if self._made is None:
                self._made = guidance.LLTokenizer(
                    self._vocabulary.tokenizer_json(),
                    n_vocab=self._vocab_size,
                    eos_token=self._end_id,
                )
            return self._made


def _import_guidance() -> Any:
    try:
        import llguidance
    except ImportError:
        return None
    return llguidance


def _check_schemas(given: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> None:
    """Check the schemas of a request. Raises OptionError."""
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


def _body(guidance: Any, given: Mapping[str, Any]) -> Json:
    """Return the option `grammar` as one of llguidance's grammars. Raises OptionError."""
    if "json" in given:
        return {"json_schema": _styled(given["json"])}
    ((kind, text),) = given.items()
    if len(text) > MOST_CHARACTERS:
        raise OptionError(
            f"the grammar has {len(text)} characters, and at most {MOST_CHARACTERS} are taken."
        )
    if kind == "regex":
        return dict(json.loads(guidance.LLMatcher.grammar_from_regex(text))["grammars"][0])
    return {"lark_grammar": text}


def _parameters(function: Mapping[str, Any]) -> Any:
    """Return the schema of a function's arguments, which are an object."""
    given = function.get("parameters")
    return _ANY_OBJECT if given is None else given


def _is_strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


def _styled(schema: Mapping[str, Any], lenient: bool = False) -> Json:
    return {**schema, "x-guidance": {**_STYLE, "lenient": lenient}}
