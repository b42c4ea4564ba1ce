"""Engine calls of a replay: when each may begin, on which cores, and what it takes."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.replaying.core_groups import CoreGroups
from bench.replaying.stage_profile import StageProfile
from qwen3_omni_neuron.compilation.plan import CHUNK_FRAMES
from testing.virtual_clock import VirtualClock

STAGE_OF = {
    "thinker.encode": "encoders",
    "thinker.prefill": "thinker_prefill",
    "thinker.step": "thinker_decode",
    "talker.prefill": "talker_prefill",
    "talker.step": "talker_step",
    "talker.predict": "code_predictor",
    "vocoder.start": "code2wav_start",
    "vocoder.step": "code2wav_step",
}


@dataclass(frozen=True)
class Behaviour:
    """How the stages are driven.

    buckets: chunk sizes that the vocoder has. chunk_frames: as the option of that name; None:
    runtime.schedule decides. start_after: text
    tokens that the talker's prefill waits for. inline_frames: the talker stands still while the
    vocoder decodes a chunk, which it does every so many frames; 0: they run side by side.
    context_frames: decoded once more with each chunk. driver: the profile's driver_start and
    driver_frame are spent.
    """

    name: str
    buckets: tuple[int, ...] = CHUNK_FRAMES
    chunk_frames: tuple[int, ...] | None = None
    start_after: int = 1
    inline_frames: int = 0
    context_frames: int = 0
    driver: bool = False


@dataclass
class _Made:
    """What there is of a slot's request."""

    tokens: int = 0
    frames: int = 0
    chunks: int = 0


class Device:
    """Spends the time of each call, in the thread of whoever makes it. `on_call` is what the timed
    engines call. A reply has at least behaviour.start_after tokens."""

    def __init__(
        self, clock: VirtualClock, profile: StageProfile, behaviour: Behaviour, cores: CoreGroups
    ):
        self._clock, self._profile, self._behaviour, self._cores = clock, profile, behaviour, cores
        self._made: dict[int, _Made] = {}
        self._changed = clock.condition(threading.RLock())

    def on_call(self, name: str, slots: Sequence[int], size: int) -> None:
        """Wait for what the call waits for, and let its time pass."""
        if name == "talker.prepare":
            return  # the profile's talker prefill is of the whole prompt
        if name == "thinker.prefill":
            self._made[slots[0]] = _Made()
        self._drive(name, slots)
        if name.startswith("vocoder"):
            size += len(slots) * self._behaviour.context_frames
        self._cores.run(name, self._profile.seconds(STAGE_OF[name], size))
        with self._changed:
            for slot in slots:
                self._count(name, self._made[slot])
            self._changed.notify_all()

    def encode(self, windows: int) -> None:
        """Let the encoders' time pass for so many windows of sound."""
        self._cores.run("thinker.encode", self._profile.seconds("encoders", windows))

    def _drive(self, name: str, slots: Sequence[int]) -> None:
        how = self._behaviour
        made = [self._made[slot] for slot in slots]
        if name == "talker.prefill":
            self._wait(lambda: all(m.tokens >= how.start_after for m in made))
            if how.driver:
                self._clock.sleep(self._profile.seconds("driver_start", 1))
        elif name == "talker.step" and how.inline_frames:
            self._wait(lambda: all(m.chunks >= m.frames // how.inline_frames for m in made))
        elif name == "talker.predict" and how.driver:
            self._clock.sleep(self._profile.seconds("driver_frame", len(slots)))

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            while not until():
                self._changed.wait()

    @staticmethod
    def _count(name: str, made: _Made) -> None:
        if name.startswith("thinker"):
            made.tokens += 1
        elif name == "talker.predict":
            made.frames += 1
        elif name.startswith("vocoder"):
            made.chunks += 1
