"""Cores and stages on a virtual clock: when each engine call of a replay begins, and what it takes.

Calls that share a group of cores take turns, in the order in which they ask for it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qwen3_omni_neuron.compilation.plan import CHUNK_FRAMES
from testing.replaying.profiles import StageProfile
from testing.virtual_clock import VirtualClock

PLACEMENTS = {
    "shared": {"thinker": "all", "talker": "all", "vocoder": "all"},
    "split": {"thinker": "thinker", "talker": "talker", "vocoder": "vocoder"},
}
STAGE_OF = {
    "thinker.encode": "encoders",
    "thinker.prefill": "thinker_prefill",
    "thinker.step": "thinker_decode",
    "talker.prefill": "talker_prefill",
    "talker.prefill_chunk": "talker_prefill",
    "talker.step": "talker_step",
    "talker.predict": "code_predictor",
    "vocoder.start": "code2wav_start",
    "vocoder.step": "code2wav_step",
}


COPY_S = 0.003  # to copy rows between slots: published as the cost of dispatching one more graph


@dataclass(frozen=True)
class Span:
    """One call on a core group, by the clock."""

    group: str
    call: str
    start_s: float
    end_s: float


class CoreGroup:
    """Cores that run one call at a time, in the order in which the calls ask for them."""

    def __init__(self, clock: VirtualClock):
        self._clock = clock
        self._changed = clock.condition(threading.RLock())
        self._tickets = self._served = 0

    def hold(self, seconds: float) -> float:
        """Wait for the cores, and hold them for `seconds`. Returns when the hold began."""
        with self._changed:
            ticket, self._tickets = self._tickets, self._tickets + 1
            while ticket != self._served:
                self._changed.wait()
        start_s = self._clock.now()
        self._clock.sleep(seconds)
        with self._changed:
            self._served += 1
            self._changed.notify_all()
        return start_s


class CoreGroups:
    """The core groups of a placement.

    "shared" is one group for all stages; "split" is one each for the thinker, the talker with its
    code predictor, and the vocoder. shared: whether the placement is "shared". spans: all calls,
    ordered by their ends.
    """

    def __init__(self, clock: VirtualClock, placement: str):
        self._clock = clock
        self.shared = placement == "shared"
        self._group_of = PLACEMENTS[placement]
        self._groups = {name: CoreGroup(clock) for name in set(self._group_of.values())}
        self.spans: list[Span] = []

    def run(self, call: str, seconds: float) -> None:
        """Spend the time of an engine's call "stage.method" on its stage's cores."""
        group = self._group_of[call.partition(".")[0]]
        start_s = self._groups[group].hold(seconds)
        self.spans.append(Span(group, call, start_s, self._clock.now()))


@dataclass(frozen=True)
class Behaviour:
    """The way in which a program calls the stages.

    buckets: chunk sizes that the vocoder is compiled for. chunk_frames: see the request option;
    None: adaptive. start_after: text tokens that the talker's prefill waits for. inline_frames:
    after every inline_frames frames the talker waits until the vocoder has decoded them; 0: they
    run concurrently. context_frames: earlier frames that are decoded again with each chunk. driver:
    whether the profile's driver_start and driver_frame are spent. knows_cores: whether the runtime
    knows which stages share cores. chunked_prefill: whether a prefill costs the time of its own
    rows, see StageProfile.prefill_by_rows_s; otherwise every prompt is padded to a bucket.
    """

    name: str
    buckets: tuple[int, ...] = CHUNK_FRAMES
    chunk_frames: tuple[int, ...] | None = None
    start_after: int = 1
    inline_frames: int = 0
    context_frames: int = 0
    driver: bool = False
    knows_cores: bool = True
    chunked_prefill: bool = False


@dataclass
class _Progress:
    """Progress of a slot's request, in counts."""

    tokens: int = 0
    frames: int = 0
    chunks: int = 0


class Device:
    """Spends the time of each engine call, in the thread that makes it.

    The timed engines call `on_call`. A reply has at least the behaviour's start_after tokens.
    """

    def __init__(
        self, clock: VirtualClock, profile: StageProfile, behaviour: Behaviour, cores: CoreGroups
    ):
        self._clock, self._profile, self._behaviour, self._cores = clock, profile, behaviour, cores
        self._progress: dict[int, _Progress] = {}
        self._changed = clock.condition(threading.RLock())

    def on_call(self, name: str, slots: Sequence[int], size: int) -> None:
        """Wait until the call may begin, and spend its time."""
        if name == "talker.prepare":
            return  # the profile's talker_prefill includes it
        if name.endswith(".copy"):
            self._cores.run(name, COPY_S)
            return
        if name == "talker.prefill_chunk":
            self._cores.run(name, self._profile.seconds(STAGE_OF[name], size))
            return
        if name == "thinker.prefill":
            self._progress[slots[0]] = _Progress()
        self._drive(name, slots)
        if name.startswith("vocoder"):
            size += len(slots) * self._behaviour.context_frames
        if name == "thinker.prefill" and self._behaviour.chunked_prefill:
            seconds = self._profile.prefill_by_rows_s(size)
        else:
            seconds = self._profile.seconds(STAGE_OF[name], size)
        if name == "talker.step" and self._joins(slots):
            seconds -= self._profile.saved_s
        self._cores.run(name, seconds)
        with self._changed:
            for slot in slots:
                self._count(name, self._progress[slot])
            self._changed.notify_all()

    def encode(self, windows: int) -> None:
        """Spend the encoders' time for `windows` windows of audio."""
        self._cores.run("thinker.encode", self._profile.seconds("encoders", windows))

    def _joins(self, slots: Sequence[int]) -> bool:
        # Into the code predictor's call; the next text rows are taken to be known.
        started = all(self._progress[slot].chunks for slot in slots)
        return started and not self._behaviour.inline_frames

    def _drive(self, name: str, slots: Sequence[int]) -> None:
        how = self._behaviour
        requests = [self._progress[slot] for slot in slots]
        if name == "talker.prefill":
            self._wait(lambda: all(r.tokens >= how.start_after for r in requests))
            if how.driver:
                self._clock.sleep(self._profile.seconds("driver_start", 1))
        elif name == "talker.step" and how.inline_frames:
            self._wait(lambda: all(r.chunks >= r.frames // how.inline_frames for r in requests))
        elif name == "talker.predict" and how.driver:
            self._clock.sleep(self._profile.seconds("driver_frame", len(slots)))

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            while not until():
                self._changed.wait()

    @staticmethod
    def _count(name: str, progress: _Progress) -> None:
        if name.startswith("thinker"):
            progress.tokens += 1
        elif name == "talker.predict":
            progress.frames += 1
        elif name.startswith("vocoder"):
            progress.chunks += 1
