"""Events and result of a request; abilities and status of a loaded model."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from html import escape
from pathlib import Path
from reprlib import Repr
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import OutputError

SAMPLE_RATE = 24000

FinishReason = Literal["stop", "length", "no_speech", "runaway"]


class ShortRepr:
    """Base of dataclasses whose repr omits defaults and shortens arrays."""

    def __repr__(self) -> str:
        shown = []
        for of in fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            value = getattr(self, of.name)
            if of.repr and not _is_default(of, value):
                shown.append(f"{of.name}={_short(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _is_default(of: "Field[Any]", value: Any) -> bool:
    default = of.default if of.default_factory is MISSING else of.default_factory()
    return type(value) is type(default) and bool(value == default)


class _Repr(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxdict, self.maxstring, self.maxother = 16, 80, 80

    def repr_ndarray(self, value: NDArray[Any], _: int) -> str:
        return f"{value.dtype} {list(value.shape)}"

    def repr_float(self, value: float, _: int) -> str:
        return f"{value:.4g}"


_short = _Repr().repr


@dataclass(frozen=True, repr=False)
class Timings(ShortRepr):
    """Times and sizes of one request. Times are in seconds from its arrival.

    queued_s: to the slot. ttft_s: to the first text token. ttfb_s: to the first audio sample; None
    without speech. total_s: to the last event. audio_s: duration of the audio. rtf: time of the
    last sample / audio_s. prompt_tokens: number of prompt tokens; reused_tokens: how many had
    cached rows; prompt_audio_tokens, prompt_image_tokens: how many are audio, and images or videos.
    text_tokens: tokens of the reply's text. frames: number of speech frames. speech_s: time of
    calls since the first token, by stage. slow_stage: the slowest stage, if its calls took longer
    than the audio.
    """

    queued_s: float
    ttft_s: float
    ttfb_s: float | None
    total_s: float
    audio_s: float
    rtf: float | None
    prompt_tokens: int
    reused_tokens: int
    text_tokens: int
    frames: int
    prompt_audio_tokens: int = 0
    prompt_image_tokens: int = 0
    speech_s: Mapping[str, float] = field(default_factory=dict)
    slow_stage: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class SpeechResult(ShortRepr):
    """Complete reply. A notebook shows its text and a player.

    text: without special tokens. token_ids: generated ids, EOS included if generated.
    codes: int64 [frames, code_groups]. audio: float32 [samples] in [-1, 1] at sample_rate Hz.
    Finish reasons: "stop" (the model ended), "length" (a limit did), and for the talker "no_speech"
    and "runaway" (see runtime.runaway). seed: repeats the request. logprobs: log-probability of
    each of token_ids, if requested, by the thinker's unmodified logits. top_logprobs: for each, the
    likeliest ids and log-probabilities. warnings: about prompt files that were ignored in part or
    changed.
    """

    text: str
    token_ids: list[int]
    codes: NDArray[np.int64]
    audio: NDArray[np.float32]
    sample_rate: int
    thinker_finish_reason: FinishReason
    talker_finish_reason: FinishReason
    timings: Timings = field(repr=False)
    seed: int
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    warnings: tuple[str, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the speech to a sound file: .wav, .mp3, .flac, .opus, .ogg or .pcm.

        The file is replaced atomically.
        Raises OutputError for another name, an unwritable file, and a reply without speech.
        """
        from qwen3_omni_neuron.events.speech_file import SpeechFile

        self._check_speech("save")
        with SpeechFile(Path(path), self.sample_rate) as file:
            file.write(self.audio)

    def play(self) -> None:
        """Play the speech: in a notebook by a player on the page, else on this machine.

        Returns after playback; in a notebook at once. Needs one of `events.playing.PROGRAMS`.
        Raises NotInstalledError without one, OutputError if it fails or the reply has no speech.
        """
        from qwen3_omni_neuron.events.playing import play

        self._check_speech("play")
        play(self.audio, self.sample_rate)

    def _repr_html_(self) -> str:
        from qwen3_omni_neuron.events.playing import player

        shown = f"<p>{escape(self.text)}</p>"
        return shown + player(self.audio, self.sample_rate) if len(self.audio) else shown

    def _check_speech(self, verb: str) -> None:
        if not len(self.audio):
            raise OutputError(
                f"the reply has no speech to {verb}: speech was not requested, or the text is "
                "empty. Ask with generate_audio, stream or say."
            )


@dataclass(frozen=True, repr=False)
class TextDelta(ShortRepr):
    """Next part of the text, in whole characters.

    logprobs, top_logprobs: as in SpeechResult.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(frozen=True, eq=False, repr=False)
class AudioChunk(ShortRepr):
    """Next part of the audio.

    samples: float32 [samples]. first_sample: its index in the reply. frames: codec frames.
    """

    samples: NDArray[np.float32]
    first_sample: int
    frames: int


@dataclass(frozen=True)
class Finished:
    """Last event of a request, with its result."""

    result: SpeechResult


Event = TextDelta | AudioChunk | Finished


@dataclass(frozen=True)
class ModelInfo:
    """Abilities and sizes of a loaded model.

    speakers: its voices. thinks: replies may begin with reasoning, which ends with </think>.
    takes_tools: its template shows tools. slots: concurrent requests. max_queued: requests that may
    wait. context_length: positions of a slot's KV cache. introduction, questions: the checkpoint's
    introduction, and example questions.
    """

    speakers: tuple[str, ...]
    thinks: bool
    takes_tools: bool
    slots: int
    max_queued: int
    context_length: int
    introduction: str = ""
    questions: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageTime:
    """Calls of a stage's engine so far, and their time in seconds.

    call_s: time of the call in progress, or 0.
    """

    calls: int
    busy_s: float
    call_s: float = 0.0


@dataclass(frozen=True)
class Status:
    """Current work of a loaded model.

    running, queued: numbers of requests. stages: times by stage. fault: why a stage failed.
    """

    running: int
    queued: int
    stages: Mapping[str, StageTime]
    fault: str | None = None
