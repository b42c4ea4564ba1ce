"""Engines that spend time on a virtual clock, and whose outputs depend on all of their inputs.

Tokens, codes and samples are computed from everything that a slot was given so far, so a row, a
frame or a chunk that comes twice, late or not at all changes every later output.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.protocols import Engines, Fault, PredictorSampling
from qwen3_omni_neuron.prompt.prompt import Prompt, TalkerPrompt
from testing.virtual_clock import VirtualClock

Reply = Callable[[Prompt], Sequence[int]]
OnCall = Callable[[str, Sequence[int], int], None]

GROUPS = 16
FRAME_SAMPLES = 1920
LATENCY_SAMPLES = 555


@dataclass(frozen=True)
class Times:
    """Seconds of a call of each kind.

    A step's time may depend on its number in the first slot, a prompt's on its number of rows.
    """

    thinker_prefill_s: float | Callable[[int], float] = 0.0
    thinker_step_s: float | Callable[[int], float] = 0.0
    talker_prepare_s: float | Callable[[int], float] = 0.0
    talker_prefill_s: float = 0.0
    talker_step_s: float | Callable[[int], float] = 0.0
    predict_s: float = 0.0
    vocoder_s: float = 0.0


@dataclass
class Sizes:
    """Sizes that the engines report."""

    slots: int = 4
    context_length: int = 65536
    vocab: int = 384
    codec_vocab: int = 1088
    chunk_frames: tuple[int, ...] = (1, 2, 4, 8, 16, 25)
    frames_at_once: int = 1000


@dataclass
class Script:
    """The replies of the engines, and a hook.

    reply: the tokens that answer a prompt, ending with the end marker. frames: number of codes 0
    before codec_eos, None for speech without end. on_call: called before each call takes its time,
    with its name, slots and size (rows of a prompt, frames of all streams with their padding, or
    else slots); it may raise or sleep.
    """

    reply: Reply
    codec_eos_id: int
    frames: int | None = None
    on_call: OnCall = field(default=lambda name, slots, size: None)


def timed_engines(
    clock: VirtualClock, times: Times, script: Script, sizes: Sizes | None = None
) -> Engines:
    """Return all three engines over one clock."""
    arguments = (clock, times, script, sizes or Sizes())
    return Engines(TimedThinker(*arguments), TimedTalker(*arguments), TimedVocoder(*arguments))


class _Timed:
    """An engine over a clock. _held: token ids in each slot of the thinker or talker."""

    chunked_prefill = True
    fault: Fault | None = None
    name = ""

    def __init__(self, clock: VirtualClock, times: Times, script: Script, sizes: Sizes):
        self._clock, self._times, self._script, self._sizes = clock, times, script, sizes
        self.slots, self.context_length = sizes.slots, sizes.context_length
        self._held: dict[int, list[int]] = {}

    def _take(self, name: str, slots: Sequence[int], size: int, seconds: float) -> None:
        self._script.on_call(name, slots, size)
        self._clock.sleep(seconds)

    def _fill(self, slot: int, token_ids: Tensor, start: int) -> None:
        """Put a prompt into a slot, which must already hold its first `start` rows."""
        ids = token_ids.tolist()
        assert self._held.get(slot, [])[:start] == ids[:start], "the slot holds other rows"
        self._held[slot] = ids

    def close(self) -> None:
        """Do nothing: there is no memory to free."""


class TimedThinker(_Timed):
    """A Thinker that replies by the script, and checks that it gets its own tokens back."""

    name = "thinker"

    def __init__(self, clock: VirtualClock, times: Times, script: Script, sizes: Sizes):
        super().__init__(clock, times, script, sizes)
        self._rest: dict[int, list[int]] = {}
        self._fed: dict[int, int] = {}

    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[Tensor, Tensor]:
        rows = len(prompt) - start
        self._take("thinker.prefill", (slot,), rows, _at(self._times.thinker_prefill_s, rows))
        self._fill(slot, prompt.token_ids, start)
        self._rest[slot], self._fed[slot] = list(self._script.reply(prompt)), 0
        return self._logits([self._rest[slot][0]]), torch.zeros(0, 1)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        seconds = _at(self._times.thinker_step_s, self._fed[slots[0]])
        self._take("thinker.step", slots, len(slots), seconds)
        next_ids = []
        for slot, token_id in zip(slots, token_ids, strict=True):
            fed = self._fed[slot]
            assert self._rest[slot][fed] == token_id, (
                "the thinker was given another token than its own"
            )
            next_ids.append(self._rest[slot][fed + 1])
        for slot, token_id in zip(slots, token_ids, strict=True):
            self._fed[slot] += 1
            self._held[slot].append(token_id)
        return self._logits(next_ids)

    def copy(self, source: int, target: int, rows: int) -> None:
        self._take("thinker.copy", (target,), rows, 0.0)
        self._held[target] = self._held[source][:rows]

    def clear(self, slot: int) -> None:
        self._held[slot] = []

    def _logits(self, token_ids: Sequence[int]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(token_ids), self._sizes.vocab).float()


class TimedTalker(_Timed):
    """A Talker whose codes depend on all rows and frames before them."""

    name = "talker"

    def __init__(self, clock: VirtualClock, times: Times, script: Script, sizes: Sizes):
        super().__init__(clock, times, script, sizes)
        self._seen: dict[int, int] = {}
        self._frames: dict[int, list[int]] = {}
        self._rows: dict[int, int] = {}
        self._next: dict[int, int | None] = {}  # token of a slot's next step, as `predict` was told

    def prefill_chunk(self, slot: int, prompt: TalkerPrompt, start: int, accepted: Tensor) -> None:
        rows = len(prompt.token_ids) - start
        self._take("talker.prefill_chunk", (slot,), rows, _at(self._times.talker_prepare_s, rows))
        self._fill(slot, prompt.token_ids, start)

    def copy(self, source: int, target: int, rows: int) -> None:
        self._take("talker.copy", (target,), rows, 0.0)
        self._held[target] = self._held[source][:rows]

    def clear(self, slot: int) -> None:
        self._held[slot] = []

    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int, start: int = 0) -> None:
        rows = len(prompt) - start
        self._take("talker.prepare", (slot,), rows, _at(self._times.talker_prepare_s, rows))
        self._fill(slot, prompt.token_ids, start)
        self._seen[slot], self._frames[slot] = seen_in(prompt, speaker_id), []
        self._next.pop(slot, None)
        self._rows[slot] = rows

    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        self._take("talker.prefill", (slot,), self._rows[slot], self._times.talker_prefill_s)
        self._seen[slot] = seen_after(self._seen[slot], first_token)
        return self._logits([slot])

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        number = len(self._frames[slots[0]])
        self._take("talker.step", slots, len(slots), _at(self._times.talker_step_s, number))
        for slot, token_id in zip(slots, token_ids, strict=True):
            assert self._next.get(slot) in (None, token_id), "another row than was told"
            self._seen[slot] = seen_after(self._seen[slot], self._frames[slot][-1], token_id)
        return self._logits(slots)

    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        self._take("talker.predict", slots, len(slots), self._times.predict_s)
        frames = [frame_of(self._seen[s], c) for s, c in zip(slots, code0, strict=True)]
        for slot, frame, how in zip(slots, frames, sampling, strict=True):
            self._frames[slot].append(int(frame[-1]))
            self._next[slot] = how.token_id
        return torch.stack(frames)

    def _logits(self, slots: Sequence[int]) -> Tensor:
        codes = []
        for slot in slots:
            ended = len(self._frames[slot]) == self._script.frames
            codes.append(self._script.codec_eos_id if ended else code0_of(self._seen[slot]))
        return torch.nn.functional.one_hot(torch.tensor(codes), self._sizes.codec_vocab).float()


class TimedVocoder(_Timed):
    """A Vocoder whose samples depend on their frame's codes."""

    def __init__(self, clock: VirtualClock, times: Times, script: Script, sizes: Sizes):
        super().__init__(clock, times, script, sizes)
        self.chunk_frames, self.frames_at_once = sizes.chunk_frames, sizes.frames_at_once
        self.frame_samples, self.latency_samples = FRAME_SAMPLES, LATENCY_SAMPLES
        self._last: dict[int, list[Tensor]] = {}

    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        self._take("vocoder.start", slots, self._frames(codes), self._times.vocoder_s)
        return [self._decode(s, [], c) for s, c in zip(slots, codes, strict=True)]

    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        self._take("vocoder.step", slots, self._frames(codes), self._times.vocoder_s)
        return [self._decode(s, self._last[s], c) for s, c in zip(slots, codes, strict=True)]

    def _frames(self, codes: Sequence[Tensor]) -> int:
        """Return the frames of all streams, padded to a chunk size."""
        return len(codes) * next(b for b in self.chunk_frames if b >= len(codes[0]))

    def _decode(self, slot: int, last: list[Tensor], codes: Tensor) -> NDArray[np.float32]:
        """Decode. last: the frame before these, whose end is decoded now; empty at the start."""
        self._last[slot] = [codes[-1]]
        return samples_of([*last, *codes])[len(last) * (FRAME_SAMPLES - LATENCY_SAMPLES) :]


def seen_in(prompt: TalkerPrompt, speaker_id: int) -> int:
    """Return a checksum of the inputs of a talker's slot: here, its prompt."""
    return seen_after(0, speaker_id, *prompt.token_ids.tolist())


def seen_after(seen: int, *more: int) -> int:
    """Return the checksum after more inputs."""
    return zlib.crc32(repr(more).encode(), seen)


def code0_of(seen: int) -> int:
    """Return the next code 0; never one that a talker suppresses."""
    return seen % 60


def frame_of(seen: int, code0: int) -> Tensor:
    """Return the frame, int64 [16], that begins with this code 0."""
    rest = [seen_after(seen, code0, group) % 1000 for group in range(1, GROUPS)]
    return torch.tensor([code0, *rest])


def samples_of(frames: Sequence[Tensor]) -> NDArray[np.float32]:
    """Return the samples of one decode of all frames."""
    levels = np.array([int(frame.sum()) / 16000 for frame in frames], dtype=np.float32)
    return np.repeat(levels, FRAME_SAMPLES)[: len(levels) * FRAME_SAMPLES - LATENCY_SAMPLES]


def spoken_frames(
    prompt: TalkerPrompt, speaker_id: int, rows: Sequence[int], frames: int
) -> list[Tensor]:
    """Return the frames of a talker that was given these text rows, the first with the prompt."""
    seen, spoken = seen_after(seen_in(prompt, speaker_id), rows[0]), []
    for number in range(frames):
        spoken.append(frame_of(seen, code0_of(seen)))
        if number + 1 < frames:
            seen = seen_after(seen, int(spoken[-1][-1]), rows[number + 1])
    return spoken


def _at(seconds: float | Callable[[int], float], number: int) -> float:
    return seconds(number) if callable(seconds) else seconds
