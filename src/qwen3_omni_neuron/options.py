"""The options of one request: the reference's names and defaults, checked by name and range."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from qwen3_omni_neuron.errors import OptionError, said
from qwen3_omni_neuron.model.config import GenerationDefaults, OmniConfig
from qwen3_omni_neuron.runtime.sampling import SamplingParams

_LARGEST_TOP_K = 2**31 - 1  # more than any vocabulary; engines keep it in a fixed width
# Samplers compute in float32, in which a score over both a temperature and a penalty has to be
# finite; and no lock waits longer than a few thousand million seconds.
_LEAST, _MOST = 1e-9, 1e9


@dataclass(frozen=True)
class RequestOptions:
    """One field an option; None means the checkpoint's own value.

    Limits count tokens: the thinker's its EOS included, the talker's codec_eos included. As in
    the reference, the talker token that meets its limit is never decoded, so N tokens give N - 1
    frames. Source: transformers Qwen3OmniMoeForConditionalGeneration.generate.

    Beyond the reference: chunk_frames, sizes of the first audio chunks in frames, the last of them
    for all that follow (None: as small and as large as a player can bear, see runtime.schedule);
    first_token_timeout_s, from the request's arrival, its time in the queue included; and
    wait_timeout_s, between any two of its tokens, frames or chunks.
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
    first_token_timeout_s: float = 600.0
    wait_timeout_s: float = 120.0

    @staticmethod
    def parse(given: Mapping[str, Any]) -> "RequestOptions":
        """Options from keyword arguments.

        Raises OptionError for a name that is none of the fields, or a value out of its range.
        """
        known = [f.name for f in fields(RequestOptions)]
        for name in given:
            if name not in known:
                close = get_close_matches(name, known, 1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise OptionError(
                    f"unknown option {said(name)}.{hint} Options: {', '.join(known)}."
                )
        for name, value in given.items():
            _check(name, value)
        return RequestOptions(**given)

    def thinker_sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        """The thinker's sampling, from the options or else the checkpoint's generation_config."""
        return SamplingParams(
            do_sample=_or(self.thinker_do_sample, defaults.do_sample),
            temperature=_or(self.thinker_temperature, defaults.temperature),
            top_k=_or(self.thinker_top_k, defaults.top_k),
            top_p=_or(self.thinker_top_p, defaults.top_p),
            repetition_penalty=defaults.repetition_penalty,
        )

    def talker_sampling(self) -> SamplingParams:
        """The talker's sampling of code 0."""
        return SamplingParams(
            do_sample=self.talker_do_sample,
            temperature=self.talker_temperature,
            top_k=self.talker_top_k,
            top_p=self.talker_top_p,
            repetition_penalty=self.talker_repetition_penalty,
        )

    def predictor_sampling(self) -> SamplingParams:
        """The code predictor's sampling of codes 1 to 15."""
        return SamplingParams(
            do_sample=self.predictor_do_sample,
            top_k=self.predictor_top_k,
            top_p=self.predictor_top_p,
        )

    def eos_ids(self, config: OmniConfig) -> frozenset[int]:
        """The thinker ids that end a reply."""
        given = self.thinker_eos_token_id
        if given is None:
            return frozenset((config.im_end_id,))
        return frozenset((given,) if isinstance(given, int) else given)

    def speaker_id(self, config: OmniConfig) -> int:
        """The codec id of the speaker, whose name is matched without case."""
        if config.talker is None:
            raise OptionError("this checkpoint has no talker: it can write text, not speak.")
        speakers = config.talker.speaker_ids
        if self.speaker.lower() not in speakers:
            names = ", ".join(name.capitalize() for name in sorted(speakers))
            raise OptionError(f"unknown speaker {said(self.speaker)}. This checkpoint has {names}.")
        return speakers[self.speaker.lower()]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check(name: str, value: Any) -> None:
    """One rule a kind of option, by the name's ending."""
    if value is None and getattr(RequestOptions, name) is None:
        return
    problem = ""
    if name == "speaker":
        problem = "" if isinstance(value, str) else "must be a name"
    elif name == "thinker_eos_token_id":
        if not _all_integers([value] if isinstance(value, int) else value, least=0):
            problem = "must be a token id or a list of them"
    elif name == "chunk_frames":
        problem = "" if _all_integers(value, least=1) else "must be a list of sizes in frames"
    elif name.endswith(("do_sample", "use_audio_in_video")):
        problem = "" if isinstance(value, bool) else "must be True or False"
    else:
        problem = _number_problem(name, value)
    if problem:
        raise OptionError(f"{name} {problem}, got {said(value)}.")


def _number_problem(name: str, value: Any) -> str:
    """Return what is wrong with the value of an option that is a number, or nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "must be a number"
    if name.endswith(("max_new_tokens", "top_k", "seed")):
        least = 1 if name.endswith("max_new_tokens") else 0
        if not isinstance(value, int) or value < least:
            return f"must be an integer of {least} or more"
        too_large = name.endswith("top_k") and value > _LARGEST_TOP_K
        return f"must be at most {_LARGEST_TOP_K}" if too_large else ""
    if name.endswith("top_p") and not 0 < value <= 1:
        return "must be above 0 and at most 1"
    if not value > 0:
        return "must be above 0"
    if value < _LEAST and not name.endswith("timeout_s"):
        return f"must be {_LEAST:g} or more"
    return "" if value <= _MOST else f"must be at most {_MOST:g}"


def _all_integers(values: Any, least: int) -> bool:
    """Whether it is a list, not empty, of integers of `least` or more."""
    return (
        isinstance(values, Sequence)
        and not isinstance(values, bytes | bytearray | memoryview)
        and len(values) > 0
        and all(isinstance(i, int) and not isinstance(i, bool) and i >= least for i in values)
    )
