"""Checks that need no reference: numbers that engines return, and a model's words heard again."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.events import SpeechResult, TextDelta
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.media.windows import SAMPLING_RATE
from qwen3_omni_neuron.serving.transcription import stream_transcript
from qwen3_omni_neuron.verification.questions import Question

_CALLS = ("encode", "prefill", "step", "predict", "start")
MOST_TOKENS, MOST_FRAMES = 64, 400


@dataclass
class Seen:
    """Results that engines have returned.

    largest: largest magnitude by stage and call. broken: calls that returned NaN or infinity. ends:
    the end code's probability after the text's end, by frame.
    """

    largest: dict[str, float] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)

    def add(self, name: str, result: Any) -> None:
        """Note a call's result."""
        for array in _arrays(result):
            if array.size:
                size = float(np.abs(array).max())
                if not math.isfinite(size):
                    self.broken[name] = self.broken.get(name, 0) + 1
                self.largest[name] = max(self.largest.get(name, 0.0), size)


def _arrays(result: Any) -> Iterator[Any]:
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield result.float().numpy()
    elif isinstance(result, np.ndarray):
        yield result
    elif isinstance(result, tuple | list):
        for one in result:
            yield from _arrays(one)
    elif hasattr(result, "deepstack"):
        yield from _arrays((result.rows, result.deepstack))


class _Watched:
    """An engine whose results are noted."""

    def __init__(self, stage: str, engine: Any, note: Callable[[str, tuple[Any, ...], Any], None]):
        self._stage, self._engine, self._note = stage, engine, note

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name not in _CALLS:
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            result = found(*arguments, **named)
            self._note(f"{self._stage}.{name}", arguments, result)
            return result

        return call


def watched(engines: Engines, config: OmniConfig, seen: Seen) -> Engines:
    """Return engines that note in `seen` what they return."""

    def note(name: str, arguments: tuple[Any, ...], result: Any) -> None:
        seen.add(name, result)
        if name == "talker.step" and config.talker is not None:
            for token, row in zip(arguments[1], result, strict=True):
                if token == config.tts_pad_id:
                    chance = torch.softmax(row.float(), -1)[config.talker.codec_eos_id]
                    seen.ends.append(float(chance))

    parts = {name: getattr(engines, name) for name in ("encoder", "thinker", "talker", "vocoder")}
    wrapped: dict[str, Any] = {n: _Watched(n, e, note) for n, e in parts.items() if e is not None}
    return replace(engines, **wrapped)


@dataclass(frozen=True)
class Spoken:
    """An answer in speech.

    heard: what the model hears in it; None without finite speech. found: share of the text's words
    that are heard in order. end: largest probability of the end code after the text's end.
    """

    question: Question
    result: SpeechResult
    heard: str | None
    found: float | None
    end: float | None


def speak(omni: Qwen3Omni, seen: Seen, questions: Sequence[Question]) -> Iterator[Spoken]:
    """Answer questions in speech, with the seed 0, and hear each answer again."""
    for question in questions:
        seen.ends.clear()
        result = omni.generate_audio(
            question.messages,
            seed=0,
            thinker_max_new_tokens=MOST_TOKENS,
            talker_max_new_tokens=MOST_FRAMES,
        )
        end = max(seen.ends, default=None)
        sounds = len(result.audio) > 0 and bool(np.isfinite(result.audio).all())
        heard = _hear(omni, result) if sounds else None
        found = None if heard is None else _words_found(result.text, heard)
        yield Spoken(question, result, heard, found, end)


def _hear(omni: Qwen3Omni, result: SpeechResult) -> str:
    import soxr

    audio = soxr.resample(result.audio, result.sample_rate, SAMPLING_RATE)
    item = {"audio": audio.clip(-1, 1), "sampling_rate": SAMPLING_RATE}
    events = stream_transcript(omni, item, max_new_tokens=2 * MOST_TOKENS)
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def _words_found(text: str, heard: str) -> float | None:
    """Return the share of words that are heard in order."""
    from difflib import SequenceMatcher

    said, again = (_words(part) for part in (text, heard))
    matched = SequenceMatcher(None, said, again, autojunk=False).get_matching_blocks()
    return sum(block.size for block in matched) / len(said) if said else None


def _words(text: str) -> list[str]:
    kept = "".join(c if c.isalnum() or c == "'" else " " for c in text.lower())
    return kept.split()
