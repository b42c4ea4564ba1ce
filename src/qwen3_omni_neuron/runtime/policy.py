"""Scheduling: whose call is next, by two rules and a queue by owner.

A *starter* is a speaking request whose text has begun and whose first chunk is not decoded; a
*listener* is one whose first chunk is decoded, until its speech is over. It is *short* where a
player that started at the first sample has audio for less than SHORT_S, and for less than
SHORT_FRAMES of its frames take.

1. **The next first sample goes first**, where stages share cores. A starter's next token waits
   until its next frame needs it: mean time to the first sample 148 ms instead of 187 (one client,
   profile `expected`). While somebody starts or is short, a listener's text is at most one token
   ahead of its frames. From TOGETHER_S before a starter's prefill is expected to end until its
   first chunk is decoded, a listener's frames and chunks wait as long as it is not short: 43.5 ms
   instead of 61.8 (`small`, eight clients: docs/benchmarks/serving.md).
2. **A prefill waits for listeners** and starters that would run out of audio during it and can be
   served first; at most as long as it is expected to take: 4.9 s instead of 7.7 (eight clients,
   profile `port-167`). Prompts of at most TOGETHER_S in all are computed without a step between
   them: 15.4 ms instead of 23.5 for eight of 2 ms. A prefill ahead waits for everybody: three
   listeners are silent for 0.03 s instead of 1.9 beside prompts of 832 rows of 2 ms.
3. **Owners take turns** for slots, encoders and prefills (`turns`): however many requests one owner
   sends, another owner's request waits for one of them at most.

The figures of profiles are those of bench/replay.py with shared cores and 24 requests.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from qwen3_omni_neuron.runtime.request import LiveRequest, frame_pace
from qwen3_omni_neuron.runtime.stage import AnyTask, Task

MARGIN = 1.25  # factor on the expected time of a prefill
SHORT_S, SHORT_FRAMES = 0.25, 16  # audio below which no text runs ahead
TOGETHER_S = 0.02  # time of prompts computed without a step between: a quarter of a frame
PREFILL_CHUNK_S = 0.1  # time of one call of a chunked prefill, after which others go on
LEAST_CHUNK_ROWS = 128
AHEAD_ROWS = 128  # most rows of a call that prefills ahead; a window of speech has 104
LEAST_HOLD_S = 1e-3  # shorter holds are left out: a wait is not that exact, and costs a wake-up

Owner = str | None


class SchedulingPolicy:
    """The rules of the module's docstring. The pipeline's lock is held in every call.

    shares_cores: whether the stages' calls share cores. frame_audio_s: audio of one frame. running:
    the requests that have a slot.
    """

    def __init__(self, shares_cores: bool, frame_audio_s: float, running: Collection[LiveRequest]):
        self._shares_cores, self._frame_audio_s = shares_cores, frame_audio_s
        self._running = running
        self._row_s: dict[int, float] = {}  # seconds a row, by the bit length of the number of rows
        self._step_s = 0.0

    def prefilled(self, rows: int, seconds: float) -> None:
        """Record how long a prefill of the thinker took."""
        self._row_s[rows.bit_length()] = seconds / max(rows, 1)

    def stepped(self, seconds: float) -> None:
        """Record how long a step of the thinker took."""
        self._step_s = seconds

    def expected_s(self, rows: int) -> float:
        """Return the expected seconds of a prefill, by the last one of about that size."""
        if not self._row_s:
            return 0.0
        digits = rows.bit_length()
        nearest = min(self._row_s, key=lambda known: (abs(known - digits), known))
        return rows * self._row_s[nearest]

    def chunk_rows(self, rows: int) -> int:
        """Return how many of a prompt's rows one call computes: see `PREFILL_CHUNK_S`."""
        while rows > LEAST_CHUNK_ROWS and self.expected_s(rows) > PREFILL_CHUNK_S:
            rows = -(-rows // 2)
        return rows

    def together(self, rows: Sequence[int]) -> int:
        """Return how many of the first prompts run without a step between. rows: their sizes."""
        sums = accumulate(map(self.expected_s, rows))
        return max(1, sum(0.0 < total <= TOGETHER_S for total in sums))

    def held_steps_s(self, lives: Iterable[LiveRequest], now: float) -> dict[LiveRequest, float]:
        """Return the requests whose next token is held by rule 1, with the longest hold in seconds.

        A frame, a chunk, or the end of a request may end a hold earlier.
        """
        if not self._shares_cores:
            return {}
        short = any(_speaks(live) and _is_short(live) for live in self._running)
        held = {}
        for live in lives:
            if not live.request.speak or live.speech_ended:
                continue
            ahead = live.text.written - len(live.codes)
            early = ahead > 0 or live.chunk_due if _starts(live) else ahead > 1 and short
            if early and _patience_s(live, now) > LEAST_HOLD_S:
                held[live] = _patience_s(live, now)
        return held

    def held_speech_s(self, lives: Iterable[LiveRequest], now: float) -> dict[LiveRequest, float]:
        """Return the requests whose frames and chunks are held by rule 1; see `held_steps_s`."""
        held: dict[LiveRequest, float] = {}
        if not self._shares_cores or not any(self._soon_heard(live, now) for live in self._running):
            return held
        for live in lives:
            chunk_s = max(0, live.chunk_wanted - live.waiting_frames) * (_frame_s(live) or 0.0)
            lasts_s = live.playback.left_s - chunk_s * MARGIN
            held_s = min(lasts_s - _short_s(live), _patience_s(live, now))
            if live.chunks and held_s > LEAST_HOLD_S:
                held[live] = held_s
        return held

    def prefill_hold_s(
        self, live: LiveRequest, rows: int, next_since_s: float, now: float
    ) -> float:
        """Return how long the next prompt may have to wait by rule 2, 0 where it may begin.

        next_since_s: when it became the next prompt. A token, a frame, a chunk, or the end of a
        request may make it 0 earlier.
        """
        expected_s = self.expected_s(rows)
        late_s = live.request.arrived_s + live.request.options.first_token_timeout_s
        left_s = min(next_since_s + expected_s, late_s - expected_s * MARGIN) - now
        if left_s <= LEAST_HOLD_S:
            return 0.0
        speaking = [other for other in self._running if _speaks(other)]
        return left_s if any(self._serves(other, expected_s, left_s) for other in speaking) else 0.0

    def is_pause(self, rows: int) -> bool:
        """Return whether so many rows may be prefilled ahead by rule 2."""
        expected_s = self.expected_s(rows)
        for live in self._running:
            if live.ended or live.request.ahead:
                continue
            writes_alone = not live.request.speak or live.speech_ended
            if live.timestamps.first_token_s is None or (writes_alone and not live.text.closed):
                return False
            if _speaks(live) and (not live.chunks or self._missing_s(live, expected_s)):
                return False
        return True

    def _soon_heard(self, live: LiveRequest, now: float) -> bool:
        """Return whether a request is a starter whose caller reads, or its prefill ends soon."""
        if live.timestamps.first_token_s is not None:
            return _starts(live) and live.output.has_space_for_token
        if live.ended or not live.request.speak or live.request.ahead:
            return False
        called_s = live.called_s["thinker"]
        begins_s = now if called_s is None else called_s
        rows = len(live.request.prompt) - live.prefilled_rows["thinker"]
        return begins_s + self.expected_s(rows) - now <= TOGETHER_S

    def _missing_s(self, live: LiveRequest, expected_s: float) -> float:
        """Return how much audio a request lacks until the frame after a prefill; 0 if none."""
        needs_s, lasts_s = expected_s, live.playback.left_s
        if self._shares_cores:
            needs_s += _frame_s(live) or 0.0
        elif live.text.closed or live.speech_ended:
            return 0.0
        else:
            # Each token becomes a frame. The last frames wait where they do not fill a chunk.
            coming = live.text.written - live.decoded_frames - (live.chunk_wanted - 1)
            lasts_s += max(0, coming) * self._frame_audio_s
            needs_s += self._step_s
        return max(0.0, needs_s * MARGIN - lasts_s)

    def _serves(self, live: LiveRequest, expected_s: float, within_s: float) -> bool:
        """Return whether a request lacks audio and can get it in this time, before a prefill."""
        missing_s = self._missing_s(live, expected_s)
        if not missing_s:
            return False
        if not self._shares_cores:
            steps = math.ceil(missing_s / self._frame_audio_s)
            reads = live.text.has_space and live.output.has_space_for_token
            return reads and steps * self._step_s <= within_s
        if not live.output.has_space_for_chunk:
            return False
        frame_s = _frame_s(live)
        if _starts(live) or not frame_s:
            return True
        return missing_s <= within_s * (self._frame_audio_s / frame_s - 1)


def turns(
    waiting: Iterable[LiveRequest],
    running: Iterable[LiveRequest],
    served_s: Mapping[Owner, float],
) -> Callable[[LiveRequest], tuple[int, float]]:
    """Return the key by which the waiting requests are sorted: rule 3.

    The owner with the fewest slots goes first; among these owners, the one that has waited longest
    since its first request came or it was last served. served_s: by owner.
    """
    slots = Counter(live.owner for live in running if not live.request.ahead)
    since_s: dict[Owner, float] = {}
    for live in waiting:
        served = served_s.get(live.owner, -math.inf)
        since_s.setdefault(live.owner, max(live.request.arrived_s, served))
    return lambda live: (slots[live.owner], since_s[live.owner])


def in_turn(waiting: Sequence[AnyTask], tasks: Sequence[Task]) -> list[AnyTask]:
    """Sort a stage's waiting tasks by `turns`. tasks: all of the stage.

    A short prompt of one owner is computed between two chunks of another one's long prompt.
    """
    if len(waiting) < 2:
        return list(waiting)
    served_s: dict[Owner, float] = {}
    for task in tasks:
        owner = task.live.owner
        served_s[owner] = max(served_s.get(owner, -math.inf), task.prefilled_s)
    turn = turns((task.live for task in waiting), (task.live for task in tasks), served_s)
    return sorted(waiting, key=lambda task: turn(task.live))


def _patience_s(live: LiveRequest, now: float) -> float:
    """Return how long a request may be held: half of its wait_timeout_s without progress."""
    return live.timestamps.progress_s + live.request.options.wait_timeout_s / 2 - now


def _frame_s(live: LiveRequest) -> float | None:
    """Return the shortest of the last intervals between frames, None before there are two frames.

    Longer intervals may include a wait for another prompt, or for a request that has ended since.
    """
    return min((after - before for before, after in pairwise(live.frame_times)), default=None)


def _speaks(live: LiveRequest) -> bool:
    """Return whether a request is a starter or a listener."""
    begun = live.request.speak and live.timestamps.first_token_s is not None
    return begun and not live.ended and not live.speech_over


def _starts(live: LiveRequest) -> bool:
    """Return whether a request is a starter."""
    return _speaks(live) and not live.chunks


def _is_short(live: LiveRequest) -> bool:
    """Return whether a speaking request has little audio, and its caller reads."""
    return live.output.has_space_for_chunk and live.playback.left_s < _short_s(live)


def _short_s(live: LiveRequest) -> float:
    """Return how many seconds of audio a listener must have not to be short."""
    frame_s = frame_pace(live.frame_times)
    return SHORT_S if frame_s is None else min(SHORT_S, SHORT_FRAMES * frame_s)
