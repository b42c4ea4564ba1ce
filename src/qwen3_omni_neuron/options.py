"""Options of a request and of a load: names, types, defaults, ranges and their documentation.

`RequestArguments` and `LoadArguments` are the keyword arguments that type checkers and editors see.
Each key carries an `OptionDoc`. `RequestOptions` and `LoadOptions` hold the defaults and check what
is given. The flags of the command line, the settings of servers and the tables of the documents are
made from both. The command line imports this module early, so it needs neither torch nor numpy.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from qwen3_omni_neuron.errors import CheckpointError, OptionError, did_you_mean, format_value
from qwen3_omni_neuron.model.config import GenerationDefaults, OmniConfig
from qwen3_omni_neuron.removed import OPTIONS, removed

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


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_line(value: Any, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most and value.isprintable()


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


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
        " or ".join(names),
        lambda value: isinstance(value, str) and value in names,
        {"enum": list(names)},
    )


def _integers_to(most: int) -> ValueRange:
    return ValueRange(
        f"an integer from 0 to {most}",
        lambda value: _is_integer(value, 0) and value <= most,
        {"minimum": 0, "maximum": most},
    )


def _numbers(least: float, most: float) -> ValueRange:
    return ValueRange(
        f"a number from {least:g} to {most:g}",
        lambda value: _is_number(value, least, most),
        {"minimum": least, "maximum": most},
    )


_NAME = ValueRange("a name", lambda value: isinstance(value, str))
_FLAG = ValueRange("True or False", lambda value: isinstance(value, bool))
_FIRST_CHUNK = _one_of("steady", "early")
_RUNAWAY_SPEECH = _one_of("end", "keep")
_FROM_0 = ValueRange("an integer of 0 or more", lambda value: _is_integer(value, 0), {"minimum": 0})
_FROM_1 = ValueRange("an integer of 1 or more", lambda value: _is_integer(value, 1), {"minimum": 1})
_TOP_K = _integers_to(_MAX_TOP_K)
_FACTOR = _numbers(_MIN_FACTOR, _MAX_NUMBER)
_INTRODUCTION = ValueRange(
    f"one line of at most {_MAX_INTRODUCTION} characters",
    lambda value: _is_line(value, _MAX_INTRODUCTION),
)
_INSTRUCTION = ValueRange(
    f"null, or a text of at most {_MAX_INSTRUCTION} characters",
    lambda value: value is None or (isinstance(value, str) and len(value) <= _MAX_INSTRUCTION),
)
_REPLY_TOKENS = ValueRange(
    "null, or an integer of 1 or more", lambda value: value is None or _is_integer(value, 1)
)
_QUESTIONS = ValueRange(
    f"a list of at most {_MAX_QUESTIONS} lines of at most {_MAX_QUESTION} characters",
    lambda value: (
        isinstance(value, tuple)
        and len(value) <= _MAX_QUESTIONS
        and all(text and _is_line(text, _MAX_QUESTION) for text in value)
    ),
)
_SECONDS = ValueRange(
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
        and all(isinstance(s, str) and 0 < len(s) <= _MOST_STOP_CHARACTERS for s in value)
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
class OptionDoc:
    """Documentation of an option, and the values that it takes.

    values: allowed values; None: checked where the option is used. default: words for a default of
    None. flag, metavar: flag on the command line and the name of its value, where they are not made
    from the option's name and type. loads: True for an option of a load that each verb which loads
    a model has as a flag.
    """

    help: str
    values: ValueRange | None = None
    default: str = "none"
    flag: str = ""
    metavar: str = ""
    loads: bool = False


_CHECKPOINT = "the checkpoint's"


class SpeechArguments(TypedDict, total=False):
    """Keyword arguments of a request to speak a given text; see `RequestOptions`."""

    speaker: Annotated[str, OptionDoc("voice of the speech, in upper or lower case", _NAME)]
    seed: Annotated[
        int | None,
        OptionDoc("seed of every random number of the request", _FROM_0, "a new one each time"),
    ]
    talker_max_new_tokens: Annotated[
        int, OptionDoc("most codec tokens of speech, the end token included", _FROM_1)
    ]
    talker_do_sample: Annotated[
        bool, OptionDoc("sample the first code of a frame; greedy where false", _FLAG)
    ]
    talker_temperature: Annotated[float, OptionDoc("temperature of the first code", _FACTOR)]
    talker_top_k: Annotated[
        int, OptionDoc("likeliest codes that the first code is sampled from, 0: all", _TOP_K)
    ]
    talker_top_p: Annotated[
        float, OptionDoc("probability that these codes add up to", _PROBABILITY)
    ]
    talker_repetition_penalty: Annotated[
        float, OptionDoc("penalty of a first code that the speech has had; 1: none", _FACTOR)
    ]
    predictor_do_sample: Annotated[
        bool, OptionDoc("sample the other codes of a frame; greedy where false", _FLAG)
    ]
    predictor_top_k: Annotated[
        int, OptionDoc("likeliest codes that each of them is sampled from, 0: all", _TOP_K)
    ]
    predictor_top_p: Annotated[
        float, OptionDoc("probability that these codes add up to", _PROBABILITY)
    ]
    chunk_frames: Annotated[
        Sequence[int] | None,
        OptionDoc(
            "frames of the first audio chunks, the last size for all that follow",
            _SIZES,
            "adaptive",
            metavar="N,N,...",
        ),
    ]
    first_chunk: Annotated[
        str,
        OptionDoc(
            "steady: the first audio chunk waits until playback can't stop after it; early: it "
            "does not, and on a machine slower than speech playback stops between chunks",
            _FIRST_CHUNK,
        ),
    ]
    runaway_speech: Annotated[
        str,
        OptionDoc(
            "speech that goes on after all words are said, in silence, in a cycle or for too long: "
            "end cuts it at the last sound, keep lets it run to its limit as the reference does",
            _RUNAWAY_SPEECH,
        ),
    ]
    cache_key: Annotated[
        str | None,
        OptionDoc("only requests with the same one reuse each other's rows", _NAME, "one for all"),
    ]
    owner: Annotated[
        str | None,
        OptionDoc(
            "whose request it is: those of different owners take turns", _NAME, "one for all"
        ),
    ]
    first_token_timeout_s: Annotated[
        float,
        OptionDoc("seconds from arrival to the first token, time in the queue included", _SECONDS),
    ]
    wait_timeout_s: Annotated[
        float, OptionDoc("seconds between any two tokens, frames or chunks", _SECONDS)
    ]


class RequestArguments(SpeechArguments, total=False):
    """Keyword arguments of a request; see `RequestOptions`."""

    use_audio_in_video: Annotated[bool, OptionDoc("encode a video's audio track too", _FLAG)]
    thinker_max_new_tokens: Annotated[
        int, OptionDoc("most tokens of text, the end token included", _FROM_1)
    ]
    thinker_eos_token_id: Annotated[
        int | Sequence[int] | None,
        OptionDoc("tokens that end the text", _TOKEN_IDS, _CHECKPOINT),
    ]
    thinker_do_sample: Annotated[
        bool | None, OptionDoc("sample the text; greedy where false", _FLAG, _CHECKPOINT)
    ]
    thinker_temperature: Annotated[
        float | None, OptionDoc("temperature of the text", _FACTOR, _CHECKPOINT)
    ]
    thinker_top_k: Annotated[
        int | None,
        OptionDoc("likeliest tokens that the text is sampled from, 0: all", _TOP_K, _CHECKPOINT),
    ]
    thinker_top_p: Annotated[
        float | None,
        OptionDoc("probability that these tokens add up to", _PROBABILITY, _CHECKPOINT),
    ]
    thinker_min_p: Annotated[
        float,
        OptionDoc("least probability of a token, as a part of the likeliest one's; 0: none", _PART),
    ]
    thinker_repetition_penalty: Annotated[
        float | None,
        OptionDoc("penalty of a token that prompt or text have; 1: none", _FACTOR, _CHECKPOINT),
    ]
    thinker_presence_penalty: Annotated[
        float, OptionDoc("number taken off the logit of a token that the text has", _PENALTY)
    ]
    thinker_frequency_penalty: Annotated[
        float, OptionDoc("number taken off it for each time that the text has it", _PENALTY)
    ]
    thinker_min_new_tokens: Annotated[
        int, OptionDoc("tokens of text before which no token ends it", _FROM_0)
    ]
    ignore_eos: Annotated[
        bool,
        OptionDoc("no token ends the text: it goes on to its limit or a stop string", _FLAG),
    ]
    stop: Annotated[
        Sequence[str],
        OptionDoc("strings that end the text before them; no part of one is spoken", _STRINGS),
    ]
    tools: Annotated[
        Sequence[Mapping[str, Any]],
        OptionDoc("functions that the reply may call, as OpenAI's API describes them", _DICTS),
    ]
    tool_choice: Annotated[
        str | Mapping[str, Any],
        OptionDoc("which of the tools the reply may or must call", _TOOL_CHOICE),
    ]
    parallel_tool_calls: Annotated[
        bool, OptionDoc("the reply may have several calls; at most one where false", _FLAG)
    ]
    grammar: Annotated[
        Mapping[str, Any] | PreparedGrammar | None,
        OptionDoc(
            "what the text is held to: a JSON schema, a regex or a Lark grammar",
            _GRAMMAR,
            "free text",
        ),
    ]
    logprobs: Annotated[
        bool,
        OptionDoc("give the log-probability of each token of the text; not with stop", _FLAG),
    ]
    top_logprobs: Annotated[
        int,
        OptionDoc("likeliest tokens whose log-probabilities come with each token's", _LIKELIEST),
    ]
    literal_text: Annotated[
        bool,
        OptionDoc("take names of special tokens in messages as words, not as these tokens", _FLAG),
    ]
    truncation: Annotated[
        str | Mapping[str, Any],
        OptionDoc(
            "auto, or a ratio: drop the oldest turns of a conversation that is too long",
            _TRUNCATION,
        ),
    ]


class LoadArguments(TypedDict, total=False):
    """Keyword arguments of `api.Qwen3Omni.load`; see `LoadOptions`."""

    target: Annotated[
        str | None,
        OptionDoc("cpu, neuron or torchneuron", _NAME, "the compiled tree's, else cpu"),
    ]
    dtype: Annotated[
        str,
        OptionDoc(
            "auto, or one that the target has: on the CPU mixed, float32, int8, int4, bfloat16 or "
            "float64",
            _NAME,
            loads=True,
        ),
    ]
    max_concurrency: Annotated[
        int | None, OptionDoc("requests that run at a time", _FROM_1, "the tree's, else 8")
    ]
    context_length: Annotated[
        int | None,
        OptionDoc(
            "positions of a request's KV cache; prompt and reply must fit",
            default="the tree's, else 8192 or the model's limit where that is less",
        ),
    ]
    max_queued: Annotated[
        int, OptionDoc("requests that wait for a slot, in the order they came", _FROM_0)
    ]
    reuse: Annotated[
        bool,
        OptionDoc("keep a prefix cache: what prompts begin with alike is computed once", _FLAG),
    ]
    placement: Annotated[
        str,
        OptionDoc(
            "shared: one process; split: a process each for thinker, talker, vocoder",
            _one_of("shared", "split"),
            loads=True,
        ),
    ]
    compiled_path: Annotated[
        str | Path | None,
        OptionDoc(
            "folder that `qwen3-omni-neuron compile` wrote; it gives weights, target, dtypes, "
            "slots, context length and buckets",
            flag="--compiled",
            metavar="DIR",
            loads=True,
        ),
    ]
    instance: Annotated[
        str | None,
        OptionDoc(
            "instance type, for the targets on Neuron, such as trn2.48xlarge",
            _NAME,
            "this machine's",
            loads=True,
        ),
    ]
    cores: Annotated[
        Mapping[str, str] | None,
        OptionDoc(
            "cores of each stage, for the targets on Neuron",
            default="the first ones",
            metavar="STAGE=N-N,...",
            loads=True,
        ),
    ]
    threads: Annotated[
        int | None,
        OptionDoc(
            "CPU threads of all stages together", _FROM_1, "as many as torch has", loads=True
        ),
    ]
    predictor_dtype: Annotated[
        str,
        OptionDoc(
            "numbers of the code predictor: auto, same or mixed; a tree has its own",
            _NAME,
            loads=True,
        ),
    ]
    adapters: Annotated[
        Sequence[str | Path | tuple[str | Path, float]],
        OptionDoc(
            "LoRA adapters that are merged into the weights in this order: PEFT's folders, each "
            "perhaps with a weight; those of a tree are named again",
            _ADAPTERS,
            "none",
            flag="--adapter",
            metavar="DIR[=WEIGHT]",
            loads=True,
        ),
    ]
    wrap_engines: Annotated[
        Callable[[Engines], Engines] | None,
        OptionDoc("function that gets the engines and returns those to run, as to record calls"),
    ]


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
    """Options of one request with their defaults; `RequestArguments` documents each.

    Names and defaults are the reference's; stop, tools, tool_choice, parallel_tool_calls, grammar,
    thinker_presence_penalty, thinker_frequency_penalty, ignore_eos, logprobs, top_logprobs,
    literal_text, truncation, chunk_frames, first_chunk, runaway_speech, cache_key, owner and the
    two timeouts are ours. A field whose default is None takes the checkpoint's value, unless
    `OptionDoc.default` names another. Limits count tokens, including the one that ends text or
    speech. As in the reference, the talker token that reaches the limit is never decoded, so N
    tokens give N - 1 frames.
    Source: transformers Qwen3OmniMoeForConditionalGeneration.generate.
    """

    speaker: str = "Ethan"
    seed: int | None = None
    use_audio_in_video: bool = False
    thinker_max_new_tokens: int = 1024
    thinker_eos_token_id: int | Sequence[int] | None = None
    thinker_do_sample: bool | None = None
    thinker_temperature: float | None = None
    thinker_top_k: int | None = None
    thinker_top_p: float | None = None
    thinker_min_p: float = 0.0
    thinker_repetition_penalty: float | None = None
    thinker_presence_penalty: float = 0.0
    thinker_frequency_penalty: float = 0.0
    thinker_min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    grammar: Mapping[str, Any] | PreparedGrammar | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    literal_text: bool = False
    truncation: str | Mapping[str, Any] = "disabled"
    talker_max_new_tokens: int = 4096
    talker_do_sample: bool = True
    talker_temperature: float = 0.9
    talker_top_k: int = 50
    talker_top_p: float = 1.0
    talker_repetition_penalty: float = 1.05
    predictor_do_sample: bool = True
    predictor_top_k: int = 50
    predictor_top_p: float = 0.8
    chunk_frames: Sequence[int] | None = None
    first_chunk: str = "steady"
    runaway_speech: str = "end"
    cache_key: str | None = None
    owner: str | None = None
    first_token_timeout_s: float = 600.0
    wait_timeout_s: float = 120.0

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
        from qwen3_omni_neuron.engines.sampling import SamplingParams

        return SamplingParams(
            do_sample=_or_default(self.thinker_do_sample, defaults.do_sample),
            temperature=_or_default(self.thinker_temperature, defaults.temperature),
            top_k=_or_default(self.thinker_top_k, defaults.top_k),
            top_p=_or_default(self.thinker_top_p, defaults.top_p),
            repetition_penalty=_or_default(
                self.thinker_repetition_penalty, defaults.repetition_penalty
            ),
            min_p=self.thinker_min_p,
            presence_penalty=self.thinker_presence_penalty,
            frequency_penalty=self.thinker_frequency_penalty,
        )

    def talker_sampling(self) -> "SamplingParams":
        """Return the talker's sampling of code 0."""
        from qwen3_omni_neuron.engines.sampling import SamplingParams

        return SamplingParams(
            do_sample=self.talker_do_sample,
            temperature=self.talker_temperature,
            top_k=self.talker_top_k,
            top_p=self.talker_top_p,
            repetition_penalty=self.talker_repetition_penalty,
        )

    def predictor_sampling(self) -> "SamplingParams":
        """Return the code predictor's sampling of codes 1 to 15."""
        from qwen3_omni_neuron.engines.sampling import SamplingParams

        return SamplingParams(
            do_sample=self.predictor_do_sample,
            top_k=self.predictor_top_k,
            top_p=self.predictor_top_p,
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
    """Options of one load with their defaults; `LoadArguments` documents each."""

    target: str | None = None
    dtype: str = "auto"
    max_concurrency: int | None = None
    context_length: int | None = None
    max_queued: int = 256
    reuse: bool = True
    placement: str = "shared"
    compiled_path: str | Path | None = None
    instance: str | None = None
    cores: Mapping[str, str] | None = None
    threads: int | None = None
    predictor_dtype: str = "auto"
    adapters: Sequence[str | Path | tuple[str | Path, float]] = ()
    wrap_engines: Callable[[Engines], Engines] | None = None

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


def check_defaults(defaults: GenerationDefaults, folder: Path) -> None:
    """Check a checkpoint's defaults as options are checked. Raises CheckpointError."""
    for name, values in (
        ("do_sample", _FLAG),
        ("temperature", _FACTOR),
        ("top_k", _TOP_K),
        ("top_p", _PROBABILITY),
        ("repetition_penalty", _FACTOR),
        ("introduction", _INTRODUCTION),
        ("questions", _QUESTIONS),
        ("transcription_instruction", _INSTRUCTION),
        ("reply_tokens", _REPLY_TOKENS),
        ("turns_by_silence", _FLAG),
    ):
        value = getattr(defaults, name)
        if not values.accepts(value):
            raise CheckpointError(
                f"{folder}/generation_config.json: {name} must be {values.phrase}, got "
                f"{format_value(value)}. Correct it there."
            )


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


@dataclass(frozen=True)
class Option:
    """One option, for the command line, a server or a document.

    type: the annotation, such as `int | None`.
    """

    name: str
    type: Any
    default: Any
    doc: OptionDoc

    @property
    def flag(self) -> str:
        """The option's flag on the command line."""
        return self.doc.flag or "--" + self.name.replace("_", "-")

    @property
    def value_type(self) -> Any:
        """The annotation's first type: int of `int | None`."""
        union = get_origin(self.type) in (Union, types.UnionType)
        return get_args(self.type)[0] if union else self.type

    @property
    def default_text(self) -> str:
        """The default in words."""
        return self.doc.default if self.default in (None, ()) else str(self.default)

    def check(self, value: Any) -> None:
        """Raise OptionError for a value out of range; None is allowed where it is the default."""
        values = self.doc.values
        if values is None or (value is None and self.default is None):
            return
        if not values.accepts(value):
            raise OptionError(f"{self.name} must be {values.phrase}, got {format_value(value)}.")


def _check(given: Mapping[str, Any], options: Iterable[Option]) -> None:
    """Raise OptionError for an unknown name, or a value out of its range."""
    known = {option.name: option for option in options}
    for name, value in given.items():
        if name not in known:
            if text := removed(name, OPTIONS):
                raise OptionError(text)
            hint = did_you_mean(name, known)
            raise OptionError(
                f"unknown option {format_value(name)}.{hint} Options: {', '.join(known)}."
            )
        known[name].check(value)


def _options_of(arguments: type, options: type) -> tuple[Option, ...]:
    """Return the options of a pair such as `RequestArguments` and `RequestOptions`."""
    hints = get_type_hints(arguments, include_extras=True)
    found = []
    for one in fields(options):
        kind, doc = get_args(hints[one.name])
        found.append(Option(one.name, kind, one.default, doc))
    return tuple(found)


REQUEST_OPTIONS = _options_of(RequestArguments, RequestOptions)
LOAD_OPTIONS = {option.name: option for option in _options_of(LoadArguments, LoadOptions)}
