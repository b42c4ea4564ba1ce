"""Scheduling: whose call is next.

A *starter* is a speaking request from its first text to its first decoded chunk; a *listener*, from
then to the end of its speech. It is *short* if a player that started at the first sample has audio
for less than min(SHORT_S, SHORT_FRAMES x frame time).

1. **The next first sample goes first**, if stages share cores. A starter's next token waits until
   its next frame needs it: 148 ms to the first sample instead of 187 (one client, profile
   `expected`). While a request starts or is short, listeners' texts are at most one token ahead of
   their frames. From TOGETHER_S before the expected end of a starter's prefill until its first
   chunk is decoded, frames and chunks of listeners that are not short wait: 43.5 ms instead of 61.8
   (`small`, eight clients: docs/benchmarks/serving.md).
2. **A prefill waits for listeners** and starters that would run out of audio during it and can be
   served first, at most for its own duration: 4.9 s instead of 7.7 (eight clients, profile
   `port-167`). Prompts of at most TOGETHER_S in total are computed without a step between: 15.4 ms
   instead of 23.5 for eight of 2 ms. A prefill ahead waits for all: 0.03 s of silence instead of
   1.9 beside prompts of 832 rows of 2 ms.
3. **Owners take turns** for slots, encoders and prefills (`turns`). If another owner was active
within RECENT_S, a prefill call lasts SHARED_CHUNK_S at most; while another owner's text is written,
the next call waits as long as the last one lasted: 45 ms for another owner's small chat instead of
421 (beside prompts of 3,510 rows, two cores).

Profiles are those of bench/replay.py with shared cores and 24 requests.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from qwen3_omni_neuron.runtime.request import LiveRequest, frame_pace
from qwen3_omni_neuron.runtime.stage import AnyTask, Task

MARGIN = 1.25  # factor on the expected time of a prefill
SHORT_S, SHORT_FRAMES = 0.25, 16  # audio below which no text runs ahead
TOGETHER_S = 0.02  # prompts without a step between: a quarter of a frame
PREFILL_CHUNK_S, SHARED_CHUNK_S = 0.1, 0.025  # one call of a chunked prefill
RECENT_S = 1.0  # an owner between two requests still counts
LEAST_CHUNK_ROWS = 128
AHEAD_ROWS = 128  # a window of speech has 104
LEAST_DELAY_S = 1e-3  # shorter waits are inexact, and cost a wake-up

Owner = str | None


class SchedulingPolicy:
    """The module docstring's rules. The pipeline's lock is held in every call.

    frame_audio_s: audio of one frame. running: requests with a slot.
    """

    def __init__(self, shares_cores: bool, frame_audio_s: float, running: Collection[LiveRequest]):
        self._shares_cores, self._frame_audio_s = shares_cores, frame_audio_s
        self._running = running
        self._row_s: dict[int, float] = {}  # seconds per row, by the number of rows' bit length
        self.step_s = 0.0  # the thinker's last
        self._ended_s: dict[Owner, float] = {}  # ends of owners' last requests, oldest first
        self._last_prefill: tuple[Owner, float, float] = None, 0.0, -math.inf

    def prefilled(self, live: LiveRequest, rows: int, seconds: float, now: float) -> None:
        """Record a thinker prefill's duration at its end."""
        self._row_s[rows.bit_length()] = seconds / max(rows, 1)
        self._last_prefill = live.owner, seconds, now

    def ended(self, live: LiveRequest, now: float) -> None:
        """Record that a request has released its slot."""
        self._ended_s.pop(live.owner, None)
        self._ended_s[live.owner] = now
        while next(iter(self._ended_s.values())) < now - RECENT_S:
            del self._ended_s[next(iter(self._ended_s))]

    def expected_s(self, rows: int) -> float:
        """Return a prefill's expected seconds: the last one's of similar size."""
        if not self._row_s:
            return 0.0
        digits = rows.bit_length()
        nearest = min(self._row_s, key=lambda known: (abs(known - digits), known))
        return rows * self._row_s[nearest]

    def chunk_rows(self, live: LiveRequest, rows: int, only_task: bool, now: float) -> int:
        """Return a prompt's rows for one call. only_task: no other task in its stage."""
        ended_s = (at_s for owner, at_s in self._ended_s.items() if owner != live.owner)
        if any(at_s > now - RECENT_S for at_s in ended_s) or self._others(live):
            most_s = SHARED_CHUNK_S
        else:
            most_s = math.inf if only_task else PREFILL_CHUNK_S
        while rows > LEAST_CHUNK_ROWS and self.expected_s(rows) > most_s:
            rows = -(-rows // 2)
        return rows

    def together(self, rows: Sequence[int]) -> int:
        """Return how many prompts run without a step between."""
        sums = accumulate(map(self.expected_s, rows))
        return max(1, sum(0.0 < total <= TOGETHER_S for total in sums))

    def delayed_steps_s(self, lives: Iterable[LiveRequest], now: float) -> dict[LiveRequest, float]:
        """Return requests whose next token rule 1 delays, with the longest delays."""
        if not self._shares_cores:
            return {}
        short = any(_speaks(live) and _is_short(live) for live in self._running)
        delays = {}
        for live in lives:
            if not live.request.speak or live.speech_ended:
                continue
            ahead = live.text.written - len(live.codes)
            early = ahead > 0 or live.chunk_due if _starts(live) else ahead > 1 and short
            if early and _patience_s(live, now) > LEAST_DELAY_S:
                delays[live] = _patience_s(live, now)
        return delays

    def delayed_speech_s(
        self, lives: Iterable[LiveRequest], now: float
    ) -> dict[LiveRequest, float]:
        """Return requests whose frames and chunks rule 1 delays, with the longest delays."""
        delays: dict[LiveRequest, float] = {}
        if not self._shares_cores or not any(self._soon_heard(live, now) for live in self._running):
            return delays
        for live in lives:
            chunk_s = max(0, live.chunk_wanted - live.waiting_frames) * (_frame_s(live) or 0.0)
            lasts_s = live.playback.left_s - chunk_s * MARGIN
            delay_s = min(lasts_s - _short_s(live), _patience_s(live, now))
            if live.chunks and delay_s > LEAST_DELAY_S:
                delays[live] = delay_s
        return delays

    def prefill_delay_s(
        self, live: LiveRequest, rows: int, next_since_s: float, now: float
    ) -> float:
        """Return how long rules 2 and 3 may delay the next prompt.

        next_since_s: when it became the next prompt.
        """
        owner, seconds, ended_s = self._last_prefill
        rest_s = ended_s + seconds - now
        if rest_s > LEAST_DELAY_S and owner == live.owner and any(map(_writes, self._others(live))):
            return rest_s
        expected_s = self.expected_s(rows)
        late_s = live.request.arrived_s + live.request.options.first_token_timeout_s
        left_s = min(next_since_s + expected_s, late_s - expected_s * MARGIN) - now
        if left_s <= LEAST_DELAY_S:
            return 0.0
        speaking = [other for other in self._running if _speaks(other)]
        return left_s if any(self._serves(other, expected_s, left_s) for other in speaking) else 0.0

    def is_pause(self, rows: int) -> bool:
        """Return whether rows may be prefilled ahead by rule 2."""
        expected_s = self.expected_s(rows)
        for live in self._running:
            if live.ended or live.request.ahead:
                continue
            writes_alone = not live.request.speak or live.speech_ended
            if live.timestamps.first_token_s is None or (writes_alone and _writes(live)):
                return False
            if _speaks(live) and (not live.chunks or self._missing_s(live, expected_s)):
                return False
        return True

    def _others(self, live: LiveRequest) -> list[LiveRequest]:
        return [other for other in self._running if other.owner != live.owner]

    def _soon_heard(self, live: LiveRequest, now: float) -> bool:
        if live.timestamps.first_token_s is not None:
            return _starts(live) and live.output.has_space_for_token
        if live.ended or not live.request.speak or live.request.ahead:
            return False
        called_s = live.called_s["thinker"]
        begins_s = now if called_s is None else called_s
        rows = len(live.request.prompt) - live.prefilled_rows["thinker"]
        return begins_s + self.expected_s(rows) - now <= TOGETHER_S

    def _missing_s(self, live: LiveRequest, expected_s: float) -> float:
        """Return the seconds of silence that a prefill would cause before the next frame."""
        needs_s, lasts_s = expected_s, live.playback.left_s
        if self._shares_cores:
            needs_s += _frame_s(live) or 0.0
        elif live.text.closed or live.speech_ended:
            return 0.0
        else:
            # Each token becomes a frame; the last ones wait for a full chunk.
            coming = live.text.written - live.decoded_frames - (live.chunk_wanted - 1)
            lasts_s += max(0, coming) * self._frame_audio_s
            needs_s += self.step_s
        return max(0.0, needs_s * MARGIN - lasts_s)

    def _serves(self, live: LiveRequest, expected_s: float, within_s: float) -> bool:
        missing_s = self._missing_s(live, expected_s)
        if not missing_s:
            return False
        if not self._shares_cores:
            steps = math.ceil(missing_s / self._frame_audio_s)
            reads = live.text.has_space and live.output.has_space_for_token
            return reads and steps * self.step_s <= within_s
        if not live.output.has_space_for_chunk:
            return False
        frame_s = _frame_s(live)
        if _starts(live) or not frame_s:
            return True
        return missing_s <= within_s * (self._frame_audio_s / frame_s - 1)


def turns(
    waiting: Iterable[LiveRequest], running: Iterable[LiveRequest], served_s: Mapping[Owner, float]
) -> Callable[[LiveRequest], tuple[int, float]]:
    """Return rule 3 as a sort key of waiting requests.

    First the owner with the fewest slots, then the one that waits longest since its first request
    or last service. served_s: by owner.
    """
    slots = Counter(live.owner for live in running if not live.request.ahead)
    since_s: dict[Owner, float] = {}
    for live in waiting:
        served = served_s.get(live.owner, -math.inf)
        since_s.setdefault(live.owner, max(live.request.arrived_s, served))
    return lambda live: (slots[live.owner], since_s[live.owner])


def in_turn(waiting: Sequence[AnyTask], tasks: Sequence[Task]) -> list[AnyTask]:
    """Sort a stage's waiting tasks by `turns`. tasks: all of the stage."""
    if len(waiting) < 2:
        return list(waiting)
    served_s: dict[Owner, float] = {}
    for task in tasks:
        owner = task.live.owner
        served_s[owner] = max(served_s.get(owner, -math.inf), task.prefilled_s)
    turn = turns((task.live for task in waiting), (task.live for task in tasks), served_s)
    return sorted(waiting, key=lambda task: turn(task.live))


def _patience_s(live: LiveRequest, now: float) -> float:
    """Return the seconds until half of wait_timeout_s passes without progress."""
    return live.timestamps.progress_s + live.request.options.wait_timeout_s / 2 - now


def _frame_s(live: LiveRequest) -> float | None:
    """Return the shortest recent interval: longer ones may include other requests' time."""
    return min((after - before for before, after in pairwise(live.frame_times)), default=None)


def _writes(live: LiveRequest) -> bool:
    return live.timestamps.first_token_s is not None and not (live.ended or live.text.closed)


def _speaks(live: LiveRequest) -> bool:
    begun = live.request.speak and live.timestamps.first_token_s is not None
    return begun and not live.ended and not live.speech_over


def _starts(live: LiveRequest) -> bool:
    return _speaks(live) and not live.chunks


def _is_short(live: LiveRequest) -> bool:
    return live.output.has_space_for_chunk and live.playback.left_s < _short_s(live)


def _short_s(live: LiveRequest) -> float:
    frame_s = frame_pace(live.frame_times)
    return SHORT_S if frame_s is None else min(SHORT_S, SHORT_FRAMES * frame_s)
