"""Options of requests, loads, compiles and servers: names, types, defaults, ranges, documentation.

`option` declares one as a dataclass field: `RequestOptions` and `LoadOptions` here, a server's in
serving.settings, a compile's in compilation.plan. Checks, flags and documents' tables derive from
these declarations (`options_of`). `RequestArguments` and `LoadArguments` are the keyword arguments
for type checkers and editors. This module imports neither torch nor numpy, for the command line.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Union, get_args, get_origin, get_type_hints

from qwen3_omni_neuron.errors import (
    REMOVED_OPTIONS,
    OptionError,
    did_you_mean,
    format_value,
    removed,
)
from qwen3_omni_neuron.model.config import GenerationDefaults, OmniConfig

if TYPE_CHECKING:
    from torch import dtype as TorchDtype

    from qwen3_omni_neuron.engines.protocols import Engines
    from qwen3_omni_neuron.engines.sampling import SamplingParams
else:
    Engines = TorchDtype = Any  # for get_type_hints: the classes need torch

INSTRUCTION = "Transcribe the speech in this audio. Answer with the words alone."
"""Default transcription instruction, for checkpoints without one."""
GIB, MIB = 1 << 30, 1 << 20
_MAX_TOP_K = 2**31 - 1  # larger than any vocabulary; engines keep it in 32 bits
# A score divided by temperature and penalty must be finite in float32, and locks wait for at most a
# few thousand million seconds.
_MIN_FACTOR, _MAX_NUMBER = 1e-9, 1e9


@dataclass(frozen=True)
class ValueRange:
    """Allowed values of an option.

    phrase: follows "must be". accepts: tests a value. limits: the range as JSON Schema keywords.
    """

    phrase: str
    accepts: Callable[[Any], bool]
    limits: Mapping[str, Any] = field(default_factory=dict)


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_adapter(value: Any) -> bool:
    folder, weight = value if isinstance(value, tuple | list) and len(value) == 2 else (value, 1)
    return isinstance(folder, str | Path) and _is_number(weight, -_MAX_NUMBER, _MAX_NUMBER)


def one_of(*names: Any, where: str = "") -> ValueRange:
    """Return the range of the listed values. where: text after them in errors."""
    *others, last = map(str, names)
    words = f"{', '.join(others)} or {last}" if others else last
    kinds = (*map(type, names),)
    return ValueRange(
        words + where, lambda value: type(value) in kinds and value in names, {"enum": [*names]}
    )


def integers(least: int, most: float = inf, where: str = "") -> ValueRange:
    """Return the range of integers from `least` to `most`. where: text after them in errors."""
    words, limits = f"an integer of {least} or more", dict[str, float](minimum=least)
    if most < inf:
        words, limits = f"an integer from {least} to {most}", {"minimum": least, "maximum": most}
    return ValueRange(
        words + where, lambda v: isinstance(v, int) and _is_number(v, least, most), limits
    )


def _numbers(least: float, most: float) -> ValueRange:
    limits, words = {"minimum": least, "maximum": most}, f"a number from {least:g} to {most:g}"
    return ValueRange(words, lambda value: _is_number(value, least, most), limits)


def positive(most: float) -> ValueRange:
    """Return the range of numbers above 0, at most `most`."""
    return ValueRange(
        f"a number above 0 and at most {most:g}",
        lambda value: _is_number(value, 0, most) and value > 0,
        {"exclusiveMinimum": 0, "maximum": most},
    )


def list_of(
    phrase: str, accepts: Callable[[Any], bool], most: float = inf, **limits: Any
) -> ValueRange:
    """Return the range of lists. accepts: tests an item. limits: see ValueRange."""
    texts = str | bytes | bytearray | memoryview
    return ValueRange(
        f"a list of {phrase}",
        lambda values: (
            isinstance(values, Sequence)
            and not isinstance(values, texts)
            and limits.get("minItems", 0) <= len(values) <= most
            and all(map(accepts, values))
        ),
        limits,
    )


_NAME = ValueRange("a name", lambda value: isinstance(value, str))
_FLAG = ValueRange("True or False", lambda value: isinstance(value, bool))
_PATH = ValueRange("a path", lambda value: isinstance(value, Path))
_OF_TYPE = {str: _NAME, bool: _FLAG, Path: _PATH}  # default ranges
_FROM_0, FROM_1 = integers(0), integers(1)
_TOP_K = integers(0, _MAX_TOP_K)
_FACTOR = _numbers(_MIN_FACTOR, _MAX_NUMBER)
SECONDS = positive(_MAX_NUMBER)
_PENALTY = _numbers(-2, 2)
_PROBABILITY = _numbers(_MIN_FACTOR, 1)
_ADAPTERS = list_of(
    f"folders, or of pairs of a folder and a number from -{_MAX_NUMBER:g} to {_MAX_NUMBER:g}",
    _is_adapter,
)
_IDS = list_of("token ids", _FROM_0.accepts, minItems=1)
_TOKEN_IDS = ValueRange(
    "a token id or a list of them", lambda value: _FROM_0.accepts(value) or _IDS.accepts(value)
)
_STRINGS = list_of(
    "at most 16 strings of 1 to 256 characters",
    lambda text: isinstance(text, str) and 0 < len(text) <= 256,
    16,
)
_DICTS = list_of("dicts", lambda one: isinstance(one, Mapping))
_SIZES = list_of(
    "sizes in frames", FROM_1.accepts, minItems=1, items={"type": "integer", "minimum": 1}
)


class PreparedGrammar:
    """Grammar of one reply, compiled before its request: `Qwen3Omni.compile_grammar` returns it."""


def _is_grammar(value: Any) -> bool:
    match value:
        case PreparedGrammar():
            return True
        case (
            {"json": {}, "strict": bool(), **others}
            | {"json": {}, **others}
            | {"regex": str(), **others}
            | {"lark": str(), **others}
        ):
            return not others
    return False


def _named_tools(choice: Any) -> list[str] | None:
    """Return the function names in a choice of tools; None if it is malformed."""
    match choice:
        case {"type": "function"}:
            tools = [choice]
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required", "tools": [_, *_] as tools},
        }:
            pass
        case _:
            return None
    names = []
    for tool in tools:
        match tool:
            case {"function": {"name": str(name)}}:
                names.append(name)
            case _:
                return None
    return names


def _is_truncation(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("auto", "disabled")
    limits = (value.get("token_limits") or {}) if isinstance(value, Mapping) else None
    if not isinstance(limits, Mapping):
        return False
    most = limits.get("post_instructions")
    return (
        value.get("type") == "retention_ratio"
        and set(value) <= {"type", "retention_ratio", "token_limits"}
        and set(limits) <= {"post_instructions"}
        and _is_number(value.get("retention_ratio"), 0, 1)
        and (most is None or _FROM_0.accepts(most))
    )


_GRAMMAR = ValueRange(
    '{"json": schema}, which may have "strict": True, {"regex": pattern} or {"lark": grammar}',
    _is_grammar,
)
_TOOL_CHOICE = ValueRange(
    'auto, none, required, {"type": "function", "function": {"name": name}} or {"type": '
    '"allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [a function each]}}',
    lambda value: value in ("auto", "none", "required") or _named_tools(value) is not None,
)
_TRUNCATION = ValueRange(
    'auto, disabled or {"type": "retention_ratio", "retention_ratio": number from 0 to 1}, which '
    'may have "token_limits": {"post_instructions": integer of 0 or more}',
    _is_truncation,
    {"type": ["string", "object"]},
)


@dataclass(frozen=True)
class Option:
    """One option, as the command line, servers and documents use it.

    type: the annotation, such as `int | None`. values: allowed values; None: checked on use.
    answer: HTTP status if a request exceeds this limit of a server. shown: text for a default whose
    value is unclear. flag, metavar: flag and the name of its value; empty: from name and type; flag
    None: no flag. loads: every verb that loads a model has the flag.
    """

    name: str
    type: Any
    default: Any
    help: str
    values: ValueRange | None
    answer: str = ""
    shown: str = ""
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
        """The default in words, with its unit."""
        default = self.default
        if self.shown or default in (None, (), MISSING):
            return self.shown or "none"
        if self.name.endswith("_bytes"):
            size, unit = (GIB, "GiB") if default % GIB == 0 else (MIB, "MiB")
            return f"{default // size} {unit}"
        return f"{default:g} s" if self.name.endswith("_s") else str(default)

    def check(self, value: Any) -> None:
        """Raise OptionError for a value out of range; None is allowed if it is the default."""
        values = self.values
        if values is None or (value is None and self.default is None):
            return
        if not values.accepts(value):
            raise OptionError(f"{self.name} must be {values.phrase}, got {format_value(value)}.")

    def converted(self, value: Any) -> Any:
        """Convert a file's or command line's value to the option's type. Raises OptionError."""
        kind = self.value_type
        if isinstance(value, str) and kind is Path:
            value = Path(value)
        elif kind is float and type(value) is int:
            value = float(value)
        elif kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        self.check(value)
        return tuple(value) if isinstance(value, list) else value


def option(
    default: Any,
    help: str,
    values: ValueRange | None = None,
    answer: str = "",
    *,
    repr: bool = True,
    **more: Any,
) -> Any:
    """Return a dataclass field that declares an option.

    values: default: any value of type str, Path or bool. repr: show the value in the dataclass's
    repr. Others: fields of Option.
    """
    made = Option("", None, default, help, values, answer, **more)
    return field(default=default, metadata={"option": made}, repr=repr)


def options_of(declared: type) -> dict[str, Option]:
    """Return the options that a dataclass declares, by name."""
    hints, found = get_type_hints(declared), {}
    for one in fields(declared):
        if made := one.metadata.get("option"):
            made = replace(made, name=one.name, type=hints[one.name])
            flag = made.flag or f"--{one.name.replace('_', '-')}"
            kinds = {*get_args(made.type), type(None)} - {type(None)} or {made.type}
            values = made.values or (_OF_TYPE.get(made.value_type) if len(kinds) == 1 else None)
            flag = "" if made.flag is None else flag
            found[one.name] = replace(made, flag=flag, values=values)
    return found


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise OptionError for an unknown name; suggest a replacement or the nearest known name."""
    for name in given:
        if name not in known:
            if text := removed(name, REMOVED_OPTIONS):
                raise OptionError(text)
            hint = did_you_mean(name, known)
            raise OptionError(
                f"unknown option {format_value(name)}.{hint} Options: {', '.join(known)}."
            )


def _check(given: Mapping[str, Any], options: Mapping[str, Option]) -> None:
    for name, value in given.items():
        check_names([name], options)
        options[name].check(value)


_own = partial(option, None, shown="the checkpoint's")
_load = partial(option, loads=True)


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
    dtype: str | TorchDtype
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
    """Keyword arguments of `api.generate_audio`: of a load and a request."""


@dataclass(frozen=True)
class ToolChoice:
    """Tools that a reply may call.

    functions: descriptions with names. required: one must be called. several: several may be.
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
    two timeouts are ours. None means the checkpoint's value, unless `shown` names another. Limits
    count tokens, end token included. As in the reference, the talker token that reaches the limit
    is not decoded, so N tokens give N - 1 frames.
    Source: transformers Qwen3OmniMoeForConditionalGeneration.generate.
    """

    speaker: str = option("Ethan", "voice of the speech; case-insensitive")
    seed: int | None = option(
        None, "seed of all random numbers", _FROM_0, shown="a new one each time"
    )
    use_audio_in_video: bool = option(False, "also encode a video's audio track")
    thinker_max_new_tokens: int = option(1024, "maximum text tokens, end token included", FROM_1)
    thinker_eos_token_id: int | Sequence[int] | None = _own("tokens that end the text", _TOKEN_IDS)
    thinker_do_sample: bool | None = _own("sample the text (false = greedy)", _FLAG)
    thinker_temperature: float | None = _own("sampling temperature of the text", _FACTOR)
    thinker_top_k: int | None = _own(
        "sample the text from the N likeliest tokens (0 = all)", _TOP_K
    )
    thinker_top_p: float | None = _own(
        "sample the text from the likeliest tokens with this total probability", _PROBABILITY
    )
    thinker_min_p: float = option(
        0.0, "minimum probability relative to the most likely token (0 = off)", _numbers(0, 1)
    )
    thinker_repetition_penalty: float | None = _own(
        "penalty for tokens already in prompt or text (1 = off)", _FACTOR
    )
    thinker_presence_penalty: float = option(
        0.0, "subtract this from logits of tokens already written", _PENALTY
    )
    thinker_frequency_penalty: float = option(
        0.0, "subtract this from a token's logit per time it was written", _PENALTY
    )
    thinker_min_new_tokens: int = option(0, "minimum text tokens before an end token", _FROM_0)
    ignore_eos: bool = option(
        False, "don't stop at an end token; generate to the limit or a stop string"
    )
    stop: Sequence[str] = option((), "end the text before any of these strings", _STRINGS)
    tools: Sequence[Mapping[str, Any]] = option(
        (), "functions that the reply may call, in OpenAI's format", _DICTS
    )
    tool_choice: str | Mapping[str, Any] = option(
        "auto", "tools that the reply may or must call", _TOOL_CHOICE
    )
    parallel_tool_calls: bool = option(True, "allow several calls in one reply")
    grammar: Mapping[str, Any] | PreparedGrammar | None = option(
        None,
        "JSON schema, regex or Lark grammar that the text must match",
        _GRAMMAR,
        shown="free text",
    )
    logprobs: bool = option(False, "return each token's log-probability; not with stop")
    top_logprobs: int = option(
        0, "return this many likeliest alternatives per token", integers(0, 20)
    )
    literal_text: bool = option(False, "treat special tokens' names in messages as plain text")
    truncation: str | Mapping[str, Any] = option(
        "disabled",
        "auto or a ratio: drop the oldest turns of a conversation that is too long",
        _TRUNCATION,
    )
    talker_max_new_tokens: int = option(
        4096, "maximum codec tokens of speech, end token included", FROM_1
    )
    talker_do_sample: bool = option(True, "sample each frame's first code (false = greedy)")
    talker_temperature: float = option(0.9, "sampling temperature of the first code", _FACTOR)
    talker_top_k: int = option(50, "sample the first code from the N likeliest (0 = all)", _TOP_K)
    talker_top_p: float = option(
        1.0, "sample the first code from the likeliest with this total probability", _PROBABILITY
    )
    talker_repetition_penalty: float = option(
        1.05, "penalty for first codes already spoken (1 = off)", _FACTOR
    )
    predictor_do_sample: bool = option(True, "sample a frame's other codes (false = greedy)")
    predictor_top_k: int = option(50, "sample other codes from the N likeliest (0 = all)", _TOP_K)
    predictor_top_p: float = option(
        0.8, "sample other codes from the likeliest with this total probability", _PROBABILITY
    )
    chunk_frames: Sequence[int] | None = option(
        None, "frames of the first audio chunks; the last size repeats", _SIZES, shown="adaptive"
    )
    first_chunk: str = option(
        "steady",
        "steady: delay the first chunk until playback can't stall; early: don't wait",
        one_of("steady", "early"),
    )
    runaway_speech: str = option(
        "end",
        "speech that continues after all words: end it at its last sound, or keep it",
        one_of("end", "keep"),
    )
    cache_key: str | None = option(
        None, "share cached prefixes only between requests with this key", shown="one for all"
    )
    owner: str | None = option(None, "requests of different owners take turns", shown="one for all")
    first_token_timeout_s: float = option(
        600.0, "seconds until the first token, time in the queue included", SECONDS
    )
    wait_timeout_s: float = option(120.0, "seconds between two tokens, frames or chunks", SECONDS)

    @staticmethod
    def parse(
        given: Mapping[str, Any],
        arguments: type = RequestArguments,
        base: "RequestOptions | None" = None,
    ) -> "RequestOptions":
        """Create options from keyword arguments. arguments: class with the allowed names.

        base: replaces the defaults. Raises OptionError for an unknown name, or a value out of
        range.
        """
        names = arguments.__annotations__
        _check(given, {one.name: one for one in REQUEST_OPTIONS if one.name in names})
        made = replace(base or RequestOptions(), **given)
        if made.logprobs and made.stop:
            raise OptionError(
                "logprobs can't be combined with stop: a stop string that begins inside a token is "
                "cut off by tokens that the model did not write. Leave one of them out."
            )
        made._check_lengths()
        return made

    def _check_lengths(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise OptionError("top_logprobs needs logprobs. Set logprobs, too.")
        if not self.goes_on:
            return
        if self.thinker_min_new_tokens > self.thinker_max_new_tokens:
            raise OptionError(
                f"thinker_min_new_tokens is {self.thinker_min_new_tokens}, more than "
                f"thinker_max_new_tokens, {self.thinker_max_new_tokens}. Raise the latter."
            )
        if self.grammar is not None or (self.tools and self.tool_choice != "none"):
            raise OptionError(
                "ignore_eos and thinker_min_new_tokens can't be combined with a grammar or tools, "
                "which determine where the text ends. Leave one of them out."
            )

    @property
    def goes_on(self) -> bool:
        """True if an end token must not always end the text."""
        return self.ignore_eos or self.thinker_min_new_tokens > 0

    def sampling(self, stage: str, defaults: GenerationDefaults | None = None) -> "SamplingParams":
        """Return the sampling of a stage: thinker, talker (code 0) or predictor.

        defaults: generation_config.json's, for thinker options that are None.
        """
        from qwen3_omni_neuron.engines.sampling import SamplingParams

        names = [one.name for one in fields(SamplingParams) if hasattr(self, f"{stage}_{one.name}")]
        given = {name: getattr(self, f"{stage}_{name}") for name in names}
        return SamplingParams(
            **{n: getattr(defaults, n) if value is None else value for n, value in given.items()}
        )

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools in the prompt: empty if none may be called, and without `strict`."""
        shown = [] if self.tool_choice == "none" else [dict(tool) for tool in self.tools]
        for tool in shown:
            if isinstance(tool.get("function"), Mapping):
                tool["function"] = {k: v for k, v in tool["function"].items() if k != "strict"}
        return shown

    @property
    def choice(self) -> ToolChoice:
        """The tools that may be called. Raises OptionError if tool_choice names an unknown one."""
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
                    f"tool_choice names {format_value(missing[0])}, but tools has "
                    f"{', '.join(map(format_value, tools)) or 'none'}."
                )
            tools = {name: tools[name] for name in names}
            allowed = self.tool_choice.get("allowed_tools")
            required = allowed is None or allowed["mode"] == "required"
            several = several and allowed is not None
        if required and not tools:
            raise OptionError("tool_choice requires a call, but tools is empty. Set tools.")
        return ToolChoice(tuple(tools.values()), required, several)

    def eos_ids(self, config: OmniConfig) -> frozenset[int]:
        """Return the thinker ids that end a reply."""
        given = self.thinker_eos_token_id
        if given is None:
            return frozenset((config.im_end_id,))
        return frozenset((given,) if isinstance(given, int) else given)

    def speaker_id(self, config: OmniConfig) -> int:
        """Return the speaker's codec id; case-insensitive."""
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
        None, "cpu, neuron or torchneuron", shown="the compiled tree's, else cpu"
    )
    dtype: str | TorchDtype = _load(
        "auto", "auto, or a dtype of the target; CPU: mixed, float32, int8, int4, bfloat16, float64"
    )
    max_concurrency: int | None = option(
        None, "concurrent requests", FROM_1, shown="the tree's, else 8"
    )
    context_length: int | None = option(
        None,
        "KV cache positions per request, prompt and reply together",
        FROM_1,
        shown="the tree's, else 8192 or the model's limit if less",
    )
    max_queued: int = option(256, "requests that may wait for a slot", _FROM_0)
    reuse: bool = option(True, "reuse KV rows of common prompt prefixes (prefix cache)")
    placement: str = _load(
        "shared",
        "shared: one process; split: a process each for thinker, talker, vocoder",
        one_of("shared", "split"),
    )
    compiled_path: str | Path | None = _load(
        None,
        "compiled tree; sets weights, target, dtypes, slots, context length and buckets",
        flag="--compiled",
        metavar="DIR",
    )
    instance: str | None = _load(
        None, "EC2 instance type for Neuron, such as trn2.48xlarge", shown="this machine's"
    )
    cores: Mapping[str, str] | None = _load(
        None, "cores of each stage, for Neuron", shown="the first ones", metavar="STAGE=N-N,..."
    )
    threads: int | None = _load(
        None, "CPU threads of all stages together", FROM_1, shown="torch's number"
    )
    predictor_dtype: str = _load(
        "auto", "dtype of the code predictor: auto, same or mixed; a tree has its own"
    )
    adapters: Sequence[str | Path | tuple[str | Path, float]] = _load(
        (),
        "merge these PEFT LoRA folders in order, each with its weight; repeat a tree's own",
        _ADAPTERS,
        flag="--adapter",
        metavar="DIR[=WEIGHT]",
    )
    wrap_engines: Callable[[Engines], Engines] | None = option(
        None, "function that wraps the engines, for example to record calls"
    )

    @staticmethod
    def parse(given: Mapping[str, Any]) -> "LoadOptions":
        """Create options from keyword arguments. Raises OptionError like RequestOptions.parse."""
        dtype = repr(given.get("dtype"))
        if dtype.startswith("torch."):
            given = {**given, "dtype": dtype.removeprefix("torch.")}
        _check(given, LOAD_OPTIONS)
        if "://" in str(given.get("compiled_path", "")):
            raise OptionError(
                f"compiled_path must be a folder, got {format_value(given['compiled_path'])}. Copy "
                "the tree to this machine, such as by `aws s3 sync`, and name its folder."
            )
        return LoadOptions(**given)


REQUEST_OPTIONS = tuple(options_of(RequestOptions).values())
LOAD_OPTIONS = options_of(LoadOptions)
