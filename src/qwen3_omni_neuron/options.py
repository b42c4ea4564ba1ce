"""Options of a request and of a load: names, types, defaults, ranges and their documentation.

`RequestArguments` and `LoadArguments` are the keyword arguments that type checkers and editors see.
`RequestOptions` and `LoadOptions` declare each with `option`, as CompilePlan and the settings of a
server do, and check what is given. The flags of the command line and the tables of the documents
are made from these declarations. The command line imports this module early, so it needs neither
torch nor numpy.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Union, get_args, get_origin, get_type_hints

from qwen3_omni_neuron.errors import (
    REMOVED_OPTIONS,
    CheckpointError,
    OptionError,
    did_you_mean,
    format_value,
    removed,
)
from qwen3_omni_neuron.model.config import GenerationDefaults, OmniConfig

if TYPE_CHECKING:
    from qwen3_omni_neuron.engines.protocols import Engines
    from qwen3_omni_neuron.engines.sampling import SamplingParams
else:
    Engines = Any  # for get_type_hints: the class needs torch

INSTRUCTION = "Transcribe the speech in this audio. Answer with the words alone."
"""Default transcription instruction, for checkpoints without one."""
_MAX_INTRODUCTION, _MAX_QUESTIONS, _MAX_QUESTION = 200, 6, 60
_MAX_INSTRUCTION = 4096
_MAX_TOP_K = 2**31 - 1  # larger than any vocabulary; engines keep it in 32 bits
# Samplers compute in float32, in which a score divided by temperature and penalty must be finite;
# and no lock can wait longer than a few thousand million seconds.
_MIN_FACTOR, _MAX_NUMBER = 1e-9, 1e9


@dataclass(frozen=True)
class ValueRange:
    """Values that an option takes.

    phrase: words that follow "must be". accepts: tests one value. limits: the same in the words of
    JSON Schema, beside its type.
    """

    phrase: str
    accepts: Callable[[Any], bool]
    limits: Mapping[str, Any] = field(default_factory=dict)


def _is_integer(value: Any, least: int, most: float = inf) -> bool:
    return isinstance(value, int) and _is_number(value, least, most)


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: Any, most: float) -> bool:
    return isinstance(value, str) and len(value) <= most


def _is_line(value: Any, most: int) -> bool:
    return _is_text(value, most) and value.isprintable()


def _is_list(values: Any) -> bool:
    texts = str | bytes | bytearray | memoryview
    return isinstance(values, Sequence) and not isinstance(values, texts)


def _are_integers(values: Any, least: int) -> bool:
    return _is_list(values) and bool(values) and all(_is_integer(one, least) for one in values)


def _is_adapter(value: Any) -> bool:
    """Return whether a value is a folder, or a folder and its weight."""
    folder, weight = value if isinstance(value, tuple | list) and len(value) == 2 else (value, 1)
    return isinstance(folder, str | Path) and _is_number(weight, -_MAX_NUMBER, _MAX_NUMBER)


def _one_of(*names: str) -> ValueRange:
    return ValueRange(
        " or ".join(names), lambda v: _is_text(v, inf) and v in names, {"enum": [*names]}
    )


def _integers_to(most: int) -> ValueRange:
    limits, words = {"minimum": 0, "maximum": most}, f"an integer from 0 to {most}"
    return ValueRange(words, lambda value: _is_integer(value, 0, most), limits)


def from_(least: int) -> ValueRange:
    """Return the range of integers of `least` or more."""
    words = f"an integer of {least} or more"
    return ValueRange(words, lambda value: _is_integer(value, least), {"minimum": least})


def _numbers(least: float, most: float) -> ValueRange:
    limits, words = {"minimum": least, "maximum": most}, f"a number from {least:g} to {most:g}"
    return ValueRange(words, lambda value: _is_number(value, least, most), limits)


_NAME = ValueRange("a name", lambda value: isinstance(value, str))
_FLAG = ValueRange("True or False", lambda value: isinstance(value, bool))
_FROM_0, FROM_1 = from_(0), from_(1)
_TOP_K = _integers_to(_MAX_TOP_K)
_FACTOR = _numbers(_MIN_FACTOR, _MAX_NUMBER)
SECONDS = ValueRange(
    f"a number above 0 and at most {_MAX_NUMBER:g}",
    lambda value: _is_number(value, 0, _MAX_NUMBER) and value > 0,
    {"exclusiveMinimum": 0, "maximum": _MAX_NUMBER},
)
_PENALTY = _numbers(-2, 2)
_ADAPTERS = ValueRange(
    f"a list of folders, or of pairs of a folder and a number from -{_MAX_NUMBER:g} to "
    f"{_MAX_NUMBER:g}",
    lambda value: isinstance(value, list | tuple) and all(map(_is_adapter, value)),
)
_PART = _numbers(0, 1)
_LIKELIEST = _integers_to(20)
_PROBABILITY = _numbers(_MIN_FACTOR, 1)
_TOKEN_IDS = ValueRange(
    "a token id or a list of them",
    lambda value: _is_integer(value, 0) or _are_integers(value, 0),
)
_MOST_STOPS, _MOST_STOP_CHARACTERS = 16, 256
_STRINGS = ValueRange(
    f"a list of at most {_MOST_STOPS} strings of 1 to {_MOST_STOP_CHARACTERS} characters",
    lambda value: (
        _is_list(value)
        and len(value) <= _MOST_STOPS
        and all(s and _is_text(s, _MOST_STOP_CHARACTERS) for s in value)
    ),
)
_DICTS = ValueRange(
    "a list of dicts",
    lambda value: _is_list(value) and all(isinstance(one, Mapping) for one in value),
)
_GRAMMAR_KINDS = ("json", "regex", "lark")


class PreparedGrammar:
    """Grammar of one reply, compiled before its request: `Qwen3Omni.compile_grammar` returns it."""


def _is_grammar(value: Any) -> bool:
    if isinstance(value, PreparedGrammar):
        return True
    if not isinstance(value, Mapping):
        return False
    kinds = [kind for kind in _GRAMMAR_KINDS if kind in value]
    others = set(value) - set(kinds) - ({"strict"} if kinds == ["json"] else set())
    if len(kinds) != 1 or others or not isinstance(value.get("strict", False), bool):
        return False
    return isinstance(value[kinds[0]], Mapping if kinds == ["json"] else str)


def _is_tool_choice(value: Any) -> bool:
    if isinstance(value, str):
        return value in _TOOL_CHOICES
    return isinstance(value, Mapping) and _named_tools(value) is not None


def _named_tools(choice: Mapping[str, Any]) -> list[str] | None:
    """Return the names of functions that a choice of tools has; None where it is malformed."""
    if choice.get("type") == "function":
        given: Any = [choice]
    else:
        allowed = choice.get("allowed_tools")
        if choice.get("type") != "allowed_tools" or not isinstance(allowed, Mapping):
            return None
        given = allowed.get("tools")
        if allowed.get("mode") not in ("auto", "required") or not isinstance(given, list | tuple):
            return None
    functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in given]
    names = [
        f["name"] for f in functions if isinstance(f, Mapping) and _NAME.accepts(f.get("name"))
    ]
    return names if names and len(names) == len(given) else None


_GRAMMAR = ValueRange(
    '{"json": schema}, which may have "strict": True, {"regex": pattern} or {"lark": grammar}',
    _is_grammar,
)
_TOOL_CHOICES = ("auto", "none", "required")
_TOOL_CHOICE = ValueRange(
    'auto, none, required, {"type": "function", "function": {"name": name}} or {"type": '
    '"allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [a function each]}}',
    _is_tool_choice,
)
_TRUNCATIONS = ("auto", "disabled")


def _is_truncation(value: Any) -> bool:
    if isinstance(value, str):
        return value in _TRUNCATIONS
    if not isinstance(value, Mapping) or value.get("type") != "retention_ratio":
        return False
    limits = value.get("token_limits") or {}
    most = limits.get("post_instructions") if isinstance(limits, Mapping) else None
    return (
        set(value) <= {"type", "retention_ratio", "token_limits"}
        and _is_number(value.get("retention_ratio"), 0, 1)
        and isinstance(limits, Mapping)
        and set(limits) <= {"post_instructions"}
        and (most is None or _is_integer(most, 0))
    )


_TRUNCATION = ValueRange(
    'auto, disabled or {"type": "retention_ratio", "retention_ratio": number from 0 to 1}, which '
    'may have "token_limits": {"post_instructions": integer of 0 or more}',
    _is_truncation,
    {"type": ["string", "object"]},
)
_SIZES = ValueRange(
    "a list of sizes in frames",
    lambda value: _are_integers(value, 1),
    {"items": {"type": "integer", "minimum": 1}, "minItems": 1},
)


@dataclass(frozen=True)
class Option:
    """One option, for the command line, a server or a document.

    type: the annotation, such as `int | None`. help: what it does. values: allowed values; None:
    checked where the option is used. answer: status of a request that exceeds a limit of a server.
    shown: words for a default of None or (). flag, metavar: flag on the command line and the name
    of its value; flag None: it has none; empty: from the option's name and type. loads: True for an
    option of a load that each verb which loads a model has as a flag.
    """

    name: str
    type: Any
    default: Any
    help: str
    values: ValueRange | None
    answer: str = ""
    shown: str = "none"
    flag: Any = ""
    metavar: str = ""
    loads: bool = False

    @property
    def value_type(self) -> Any:
        """The annotation's first type: int of `int | None`."""
        union = get_origin(self.type) in (Union, types.UnionType)
        return get_args(self.type)[0] if union else self.type

    @property
    def default_text(self) -> str:
        """The default in words."""
        return self.shown if self.default in (None, (), MISSING) else str(self.default)

    def check(self, value: Any) -> None:
        """Raise OptionError for a value out of range; None is allowed where it is the default."""
        values = self.values
        if values is None or (value is None and self.default is None):
            return
        if not values.accepts(value):
            raise OptionError(f"{self.name} must be {values.phrase}, got {format_value(value)}.")


def option(
    default: Any,
    help: str,
    values: ValueRange | None = None,
    answer: str = "",
    *,
    repr: bool = True,
    **more: Any,
) -> Any:
    """Return the field of an option of a request, a load, a compile or a server.

    repr: whether a repr shows the value. The others, more: fields of Option.
    """
    made = Option("", None, default, help, values, answer, **more)
    return field(default=default, metadata={"option": made}, repr=repr)


_CHECKPOINT = "the checkpoint's"


class SpeechArguments(TypedDict, total=False):
    """Keyword arguments of a request to speak a given text; see `RequestOptions`."""

    speaker: str
    seed: int | None
    talker_max_new_tokens: int
    talker_do_sample: bool
    talker_temperature: float
    talker_top_k: int
    talker_top_p: float
    talker_repetition_penalty: float
    predictor_do_sample: bool
    predictor_top_k: int
    predictor_top_p: float
    chunk_frames: Sequence[int] | None
    first_chunk: str
    runaway_speech: str
    cache_key: str | None
    owner: str | None
    first_token_timeout_s: float
    wait_timeout_s: float


class RequestArguments(SpeechArguments, total=False):
    """Keyword arguments of a request; see `RequestOptions`."""

    use_audio_in_video: bool
    thinker_max_new_tokens: int
    thinker_eos_token_id: int | Sequence[int] | None
    thinker_do_sample: bool | None
    thinker_temperature: float | None
    thinker_top_k: int | None
    thinker_top_p: float | None
    thinker_min_p: float
    thinker_repetition_penalty: float | None
    thinker_presence_penalty: float
    thinker_frequency_penalty: float
    thinker_min_new_tokens: int
    ignore_eos: bool
    stop: Sequence[str]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    grammar: Mapping[str, Any] | PreparedGrammar | None
    logprobs: bool
    top_logprobs: int
    literal_text: bool
    truncation: str | Mapping[str, Any]


class LoadArguments(TypedDict, total=False):
    """Keyword arguments of `api.Qwen3Omni.load`; see `LoadOptions`."""

    target: str | None
    dtype: str
    max_concurrency: int | None
    context_length: int | None
    max_queued: int
    reuse: bool
    placement: str
    compiled_path: str | Path | None
    instance: str | None
    cores: Mapping[str, str] | None
    threads: int | None
    predictor_dtype: str
    adapters: Sequence[str | Path | tuple[str | Path, float]]
    wrap_engines: Callable[[Engines], Engines] | None


class GenerateArguments(LoadArguments, RequestArguments, total=False):
    """Keyword arguments of `api.generate_audio`: those of a load and of a request."""


@dataclass(frozen=True)
class ToolChoice:
    """Tools that a reply may call.

    functions: their descriptions, each with a name. required: the reply is a call. several: it may
    have more than one.
    """

    functions: tuple[Mapping[str, Any], ...]
    required: bool
    several: bool


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request.

    Names and defaults are the reference's; stop, tools, tool_choice, parallel_tool_calls, grammar,
    thinker_presence_penalty, thinker_frequency_penalty, ignore_eos, logprobs, top_logprobs,
    literal_text, truncation, chunk_frames, first_chunk, runaway_speech, cache_key, owner and the
    two timeouts are ours. A field whose default is None takes the checkpoint's value, unless
    `shown` names another. Limits count tokens, including the one that ends text or
    speech. As in the reference, the talker token that reaches the limit is never decoded, so N
    tokens give N - 1 frames.
    Source: transformers Qwen3OmniMoeForConditionalGeneration.generate.
    """

    speaker: str = option("Ethan", "voice of the speech, in upper or lower case", _NAME)
    seed: int | None = option(
        None, "seed of every random number of the request", _FROM_0, shown="a new one each time"
    )
    use_audio_in_video: bool = option(False, "encode a video's audio track too", _FLAG)
    thinker_max_new_tokens: int = option(
        1024, "most tokens of text, the end token included", FROM_1
    )
    thinker_eos_token_id: int | Sequence[int] | None = option(
        None, "tokens that end the text", _TOKEN_IDS, shown=_CHECKPOINT
    )
    thinker_do_sample: bool | None = option(
        None, "sample the text; greedy where false", _FLAG, shown=_CHECKPOINT
    )
    thinker_temperature: float | None = option(
        None, "temperature of the text", _FACTOR, shown=_CHECKPOINT
    )
    thinker_top_k: int | None = option(
        None, "likeliest tokens that the text is sampled from, 0: all", _TOP_K, shown=_CHECKPOINT
    )
    thinker_top_p: float | None = option(
        None, "probability that these tokens add up to", _PROBABILITY, shown=_CHECKPOINT
    )
    thinker_min_p: float = option(
        0.0, "least probability of a token, as a part of the likeliest one's; 0: none", _PART
    )
    thinker_repetition_penalty: float | None = option(
        None, "penalty of a token that prompt or text have; 1: none", _FACTOR, shown=_CHECKPOINT
    )
    thinker_presence_penalty: float = option(
        0.0, "number taken off the logit of a token that the text has", _PENALTY
    )
    thinker_frequency_penalty: float = option(
        0.0, "number taken off it for each time that the text has it", _PENALTY
    )
    thinker_min_new_tokens: int = option(0, "tokens of text before which no token ends it", _FROM_0)
    ignore_eos: bool = option(
        False, "no token ends the text: it goes on to its limit or a stop string", _FLAG
    )
    stop: Sequence[str] = option(
        (), "strings that end the text before them; no part of one is spoken", _STRINGS
    )
    tools: Sequence[Mapping[str, Any]] = option(
        (), "functions that the reply may call, as OpenAI's API describes them", _DICTS
    )
    tool_choice: str | Mapping[str, Any] = option(
        "auto", "which of the tools the reply may or must call", _TOOL_CHOICE
    )
    parallel_tool_calls: bool = option(
        True, "the reply may have several calls; at most one where false", _FLAG
    )
    grammar: Mapping[str, Any] | PreparedGrammar | None = option(
        None,
        "what the text is held to: a JSON schema, a regex or a Lark grammar",
        _GRAMMAR,
        shown="free text",
    )
    logprobs: bool = option(
        False, "give the log-probability of each token of the text; not with stop", _FLAG
    )
    top_logprobs: int = option(
        0, "likeliest tokens whose log-probabilities come with each token's", _LIKELIEST
    )
    literal_text: bool = option(
        False, "take names of special tokens in messages as words, not as these tokens", _FLAG
    )
    truncation: str | Mapping[str, Any] = option(
        "disabled",
        "auto, or a ratio: drop the oldest turns of a conversation that is too long",
        _TRUNCATION,
    )
    talker_max_new_tokens: int = option(
        4096, "most codec tokens of speech, the end token included", FROM_1
    )
    talker_do_sample: bool = option(
        True, "sample the first code of a frame; greedy where false", _FLAG
    )
    talker_temperature: float = option(0.9, "temperature of the first code", _FACTOR)
    talker_top_k: int = option(
        50, "likeliest codes that the first code is sampled from, 0: all", _TOP_K
    )
    talker_top_p: float = option(1.0, "probability that these codes add up to", _PROBABILITY)
    talker_repetition_penalty: float = option(
        1.05, "penalty of a first code that the speech has had; 1: none", _FACTOR
    )
    predictor_do_sample: bool = option(
        True, "sample the other codes of a frame; greedy where false", _FLAG
    )
    predictor_top_k: int = option(
        50, "likeliest codes that each of them is sampled from, 0: all", _TOP_K
    )
    predictor_top_p: float = option(0.8, "probability that these codes add up to", _PROBABILITY)
    chunk_frames: Sequence[int] | None = option(
        None,
        "frames of the first audio chunks, the last size for all that follow",
        _SIZES,
        shown="adaptive",
        metavar="N,N,...",
    )
    first_chunk: str = option(
        "steady",
        "steady: the first audio chunk waits until playback can't stop after it; early: it "
        "does not, and on a machine slower than speech playback stops between chunks",
        _one_of("steady", "early"),
    )
    runaway_speech: str = option(
        "end",
        "speech that goes on after all words are said, in silence, in a cycle or for too long: "
        "end cuts it at the last sound, keep lets it run to its limit as the reference does",
        _one_of("end", "keep"),
    )
    cache_key: str | None = option(
        None, "only requests with the same one reuse each other's rows", _NAME, shown="one for all"
    )
    owner: str | None = option(
        None,
        "whose request it is: those of different owners take turns",
        _NAME,
        shown="one for all",
    )
    first_token_timeout_s: float = option(
        600.0, "seconds from arrival to the first token, time in the queue included", SECONDS
    )
    wait_timeout_s: float = option(
        120.0, "seconds between any two tokens, frames or chunks", SECONDS
    )

    @staticmethod
    def parse(
        given: Mapping[str, Any],
        arguments: type = RequestArguments,
        base: "RequestOptions | None" = None,
    ) -> "RequestOptions":
        """Make options from keyword arguments. arguments: the class that names the allowed ones.

        base: values of the other options, instead of the defaults. Raises OptionError for another
        name, or a value out of its range.
        """
        names = arguments.__annotations__
        _check(given, [option for option in REQUEST_OPTIONS if option.name in names])
        made = replace(base or RequestOptions(), **given)
        if made.logprobs and made.stop:
            raise OptionError(
                "logprobs can't be given with stop: where a stop string begins inside of a token, "
                "the text has tokens that the model did not write. Leave one of them out."
            )
        made._check_lengths()
        return made

    def _check_lengths(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise OptionError("top_logprobs needs logprobs. Give logprobs, too.")
        if not self.goes_on:
            return
        if self.thinker_min_new_tokens > self.thinker_max_new_tokens:
            raise OptionError(
                f"thinker_min_new_tokens is {self.thinker_min_new_tokens}, more than "
                f"thinker_max_new_tokens, {self.thinker_max_new_tokens}. Raise the latter."
            )
        if self.grammar is not None or (self.tools and self.tool_choice != "none"):
            raise OptionError(
                "ignore_eos and thinker_min_new_tokens can't be given with a grammar or tools, "
                "which say themselves where the text ends. Leave one of them out."
            )

    @property
    def goes_on(self) -> bool:
        """True where some of the text's tokens must not be one that ends it."""
        return self.ignore_eos or self.thinker_min_new_tokens > 0

    @staticmethod
    def stored(given: Mapping[str, Any]) -> dict[str, Any]:
        """Return options that an earlier version stored, with values of this one."""
        redrawn = given.get("runaway_speech") == "redraw"
        return {**given, "runaway_speech": "end"} if redrawn else dict(given)

    def thinker_sampling(self, defaults: GenerationDefaults) -> "SamplingParams":
        """Return the thinker's sampling, from the options or else from generation_config.json."""
        return self._sampling("thinker_", defaults)

    def talker_sampling(self) -> "SamplingParams":
        """Return the talker's sampling of code 0."""
        return self._sampling("talker_")

    def predictor_sampling(self) -> "SamplingParams":
        """Return the code predictor's sampling of codes 1 to 15."""
        return self._sampling("predictor_")

    def _sampling(self, stage: str, defaults: object = None) -> "SamplingParams":
        from qwen3_omni_neuron.engines.sampling import SamplingParams

        given = {
            one.name: getattr(self, stage + one.name)
            for one in fields(SamplingParams)
            if hasattr(self, stage + one.name)
        }
        return SamplingParams(
            **{n: getattr(defaults, n) if value is None else value for n, value in given.items()}
        )

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as the prompt shows them: none where none may be called, and no `strict`."""
        shown = [] if self.tool_choice == "none" else [dict(tool) for tool in self.tools]
        for tool in shown:
            if isinstance(tool.get("function"), Mapping):
                tool["function"] = {k: v for k, v in tool["function"].items() if k != "strict"}
        return shown

    @property
    def choice(self) -> ToolChoice:
        """The tools that may be called. Raises OptionError for a choice of tools that lack it."""
        if self.tool_choice == "none":
            return ToolChoice((), False, False)
        tools = {}
        for index, tool in enumerate(self.tools):
            function = tool.get("function")
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise OptionError(
                    f"tools[{index}] has no function with a name, got {format_value(tool)}."
                )
            tools[function["name"]] = function
        required, several = self.tool_choice == "required", self.parallel_tool_calls
        if isinstance(self.tool_choice, Mapping):
            names = _named_tools(self.tool_choice) or []
            missing = [name for name in names if name not in tools]
            if missing:
                raise OptionError(
                    f"tool_choice names {format_value(missing[0])}, and tools has "
                    f"{', '.join(map(format_value, tools)) or 'none'}."
                )
            tools = {name: tools[name] for name in names}
            allowed = self.tool_choice.get("allowed_tools")
            required = allowed is None or allowed["mode"] == "required"
            several = several and allowed is not None
        if required and not tools:
            raise OptionError("tool_choice requires a call, and there are no tools. Give tools.")
        return ToolChoice(tuple(tools.values()), required, several)

    def eos_ids(self, config: OmniConfig) -> frozenset[int]:
        """Return the thinker ids that end a reply."""
        given = self.thinker_eos_token_id
        if given is None:
            return frozenset((config.im_end_id,))
        return frozenset((given,) if isinstance(given, int) else given)

    def speaker_id(self, config: OmniConfig) -> int:
        """Return the codec id of the speaker, whose name is matched without case."""
        if config.talker is None:
            raise OptionError("this checkpoint has no talker: it can write text, not speak.")
        speakers = config.talker.speaker_ids
        if self.speaker.lower() not in speakers:
            names = ", ".join(name.capitalize() for name in sorted(speakers))
            hint = did_you_mean(self.speaker.capitalize(), names.split(", "))
            raise OptionError(
                f"unknown speaker {format_value(self.speaker)}.{hint} This checkpoint has {names}."
            )
        return speakers[self.speaker.lower()]


@dataclass(frozen=True)
class LoadOptions:
    """Options of one load."""

    target: str | None = option(
        None, "cpu, neuron or torchneuron", _NAME, shown="the compiled tree's, else cpu"
    )
    dtype: str = option(
        "auto",
        "auto, or one that the target has: on the CPU mixed, float32, int8, int4, bfloat16 or "
        "float64",
        _NAME,
        loads=True,
    )
    max_concurrency: int | None = option(
        None, "requests that run at a time", FROM_1, shown="the tree's, else 8"
    )
    context_length: int | None = option(
        None,
        "positions of a request's KV cache; prompt and reply must fit",
        shown="the tree's, else 8192 or the model's limit where that is less",
    )
    max_queued: int = option(256, "requests that wait for a slot, in the order they came", _FROM_0)
    reuse: bool = option(
        True, "keep a prefix cache: what prompts begin with alike is computed once", _FLAG
    )
    placement: str = option(
        "shared",
        "shared: one process; split: a process each for thinker, talker, vocoder",
        _one_of("shared", "split"),
        loads=True,
    )
    compiled_path: str | Path | None = option(
        None,
        "folder that `qwen3-omni-neuron compile` wrote; it gives weights, target, dtypes, "
        "slots, context length and buckets",
        flag="--compiled",
        metavar="DIR",
        loads=True,
    )
    instance: str | None = option(
        None,
        "instance type, for the targets on Neuron, such as trn2.48xlarge",
        _NAME,
        shown="this machine's",
        loads=True,
    )
    cores: Mapping[str, str] | None = option(
        None,
        "cores of each stage, for the targets on Neuron",
        shown="the first ones",
        metavar="STAGE=N-N,...",
        loads=True,
    )
    threads: int | None = option(
        None,
        "CPU threads of all stages together",
        FROM_1,
        shown="as many as torch has",
        loads=True,
    )
    predictor_dtype: str = option(
        "auto",
        "numbers of the code predictor: auto, same or mixed; a tree has its own",
        _NAME,
        loads=True,
    )
    adapters: Sequence[str | Path | tuple[str | Path, float]] = option(
        (),
        "LoRA adapters that are merged into the weights in this order: PEFT's folders, each "
        "perhaps with a weight; those of a tree are named again",
        _ADAPTERS,
        shown="none",
        flag="--adapter",
        metavar="DIR[=WEIGHT]",
        loads=True,
    )
    wrap_engines: Callable[[Engines], Engines] | None = option(
        None, "function that gets the engines and returns those to run, as to record calls"
    )

    @staticmethod
    def parse(given: Mapping[str, Any]) -> "LoadOptions":
        """Make options from keyword arguments. Raises OptionError as RequestOptions.parse does."""
        _check(given, LOAD_OPTIONS.values())
        if "://" in str(given.get("compiled_path", "")):
            raise OptionError(
                f"compiled_path must be a folder, got {format_value(given['compiled_path'])}. Copy "
                "the tree to this machine, such as by `aws s3 sync`, and name its folder."
            )
        return LoadOptions(**given)


_DEFAULTS = {
    "do_sample": _FLAG,
    "temperature": _FACTOR,
    "top_k": _TOP_K,
    "top_p": _PROBABILITY,
    "repetition_penalty": _FACTOR,
    "introduction": ValueRange(
        f"one line of at most {_MAX_INTRODUCTION} characters",
        lambda value: _is_line(value, _MAX_INTRODUCTION),
    ),
    "questions": ValueRange(
        f"a list of at most {_MAX_QUESTIONS} lines of at most {_MAX_QUESTION} characters",
        lambda value: (
            isinstance(value, tuple)
            and len(value) <= _MAX_QUESTIONS
            and all(text and _is_line(text, _MAX_QUESTION) for text in value)
        ),
    ),
    "transcription_instruction": ValueRange(
        f"null, or a text of at most {_MAX_INSTRUCTION} characters",
        lambda value: value is None or _is_text(value, _MAX_INSTRUCTION),
    ),
    "reply_tokens": ValueRange(
        "null, or an integer of 1 or more", lambda value: value is None or _is_integer(value, 1)
    ),
    "turns_by_silence": _FLAG,
}


def check_defaults(defaults: GenerationDefaults, folder: Path) -> None:
    """Check a checkpoint's defaults as options are checked. Raises CheckpointError."""
    for name, values in _DEFAULTS.items():
        value = getattr(defaults, name)
        if not values.accepts(value):
            raise CheckpointError(
                f"{folder}/generation_config.json: {name} must be {values.phrase}, got "
                f"{format_value(value)}. Correct it there."
            )


def _check(given: Mapping[str, Any], options: Iterable[Option]) -> None:
    """Raise OptionError for an unknown name, or a value out of its range."""
    known = {option.name: option for option in options}
    for name, value in given.items():
        if name not in known:
            if text := removed(name, REMOVED_OPTIONS):
                raise OptionError(text)
            hint = did_you_mean(name, known)
            raise OptionError(
                f"unknown option {format_value(name)}.{hint} Options: {', '.join(known)}."
            )
        known[name].check(value)


def options_of(declared: type) -> dict[str, Option]:
    """Return the options that a dataclass declares, by name."""
    hints, found = get_type_hints(declared), {}
    for one in fields(declared):
        if made := one.metadata.get("option"):
            flag = made.flag or f"--{one.name.replace('_', '-')}"
            own = {"type": hints[one.name], "flag": "" if made.flag is None else flag}
            found[one.name] = replace(made, name=one.name, **own)
    return found


REQUEST_OPTIONS = tuple(options_of(RequestOptions).values())
LOAD_OPTIONS = options_of(LoadOptions)
