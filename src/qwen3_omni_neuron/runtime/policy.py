"""Scheduling policy: which request's work waits for another's, so that no listener has to wait.

The stages ask `SchedulingPolicy` before each call. A *starter* is a speaking request whose text has
begun and whose first chunk is not decoded; a *listener* is one whose first chunk is decoded, until
its speech is over. Audio *lasts* until a player that started at the first sample has played it. A
listener is *short* where its audio lasts less than SHORT_S, and less than SHORT_FRAMES of its
frames take.

1. **A step for a starter waits until its next frame needs the token**, where stages share cores:
   the talker has used every token before it, and the vocoder has no chunk of it to decode. While
   there is a starter or a listener that is short, a listener's text is at most one token ahead of
   its frames; otherwise text runs ahead, since the caller wants it early. Requests for text alone
   never wait, nor does one without progress for half of its wait_timeout_s. Example: the talker's
   prefill takes 27 ms, a frame 9, the vocoder's call 7, a thinker step 10. Where text runs ahead,
   three steps come between them: 79 ms from the first token to the first sample instead of 43.
   Mean TTFB with the rule and without it: 720 and 750 ms for one client at the port's latencies, 30
   and 46 ms for four where a prefill takes 14 ms.

2. **A prompt waits for a listener who would run out of audio during its prefill and can be served
   first**, and for a starter. Where stages share cores nothing else runs during a prefill: the
   listener has only its decoded audio, which must last MARGIN times the prefill and one frame.
   Where the thinker has cores of its own, the listener also has its frames and its tokens, as far
   as they fill chunks, and is served by the thinker's next steps. A prompt waits at most as long as
   its own prefill is expected to take, and never so long that its first token would be late; where
   listeners can't be served within that, such as eight of them on slow cores, not at all. Example:
   a prefill of 400 ms, and a listener with 300 ms of audio whose frames of 80 ms arrive every
   30 ms. It needs 1.25 * (400 + 30) = 538 ms, and gains 50 ms in 30: the prefill begins after
   143 ms. Prompts that are expected to take at most TOGETHER_S in all are computed one after the
   other, without a step between them. Mean TTFB with the rule and without it: 4.9 and 7.7 s for
   eight clients at the port's latencies, 67 and 83 ms where a prefill takes 14 ms; without
   TOGETHER_S 23.5 ms instead of 15.4 for eight prompts of 2 ms at once.

3. **Prefill ahead runs only where nobody waits**, such as that of speech that is still arriving:
   no request waits for its first token or its first chunk, none writes text without speech, and
   every listener's audio lasts MARGIN times the expected time of these rows and of a frame.
   Example: 104 rows take 54 ms and a frame 14, and a listener has 70 ms of audio, less than
   1.25 * (54 + 14) = 85: they wait for its next chunk. Three listeners beside prompts of 832 rows
   of 2 ms are silent for 0.03 s with the rule, 1.9 s without.

4. **A listener whose audio lasts waits for a starter's first chunk**, where stages share cores: its
   next frames and chunk are not computed until it would be short when that chunk has come. It waits
   from TOGETHER_S before the starter's prefill is expected to end, so that talker and vocoder are
   free then; where a prefill takes less, from the moment when it is due. Mean TTFB with the rule
   and without it: 30 and 35 ms for four clients where a prefill takes 14 ms, 67 and 81 ms for
   eight.

The figures are those of bench/replay.py with shared cores (24 requests) and of the simulation that
the tests use. A long prompt's prefill is a chunked one where others run (PREFILL_CHUNK_S): beside
24 chats with images of 3 megapixels another client's longest gap is 0.2 s instead of 1.7.

The expected time of a prefill is its number of rows times the seconds a row of the last prefill of
about that size; 0 before the first one was measured.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise

from qwen3_omni_neuron.runtime.request import LiveRequest, frame_pace

MARGIN = 1.25  # factor on the expected time of a prefill
SHORT_S, SHORT_FRAMES = 0.25, 16  # audio below which no text runs ahead
TOGETHER_S = 0.02  # time of prompts computed without a step between: a quarter of a frame
PREFILL_CHUNK_S = 0.1  # time of one call of a chunked prefill, after which others go on
LEAST_CHUNK_ROWS = 128
AHEAD_ROWS = 128  # most rows of a call that prefills ahead; a window of speech has 104
LEAST_HOLD_S = 1e-3  # shorter holds are left out: a wait is not that exact, and costs a wake-up


class SchedulingPolicy:
    """The rules of the module's docstring, for the requests that run.

    shares_cores: whether the stages' calls share cores. frame_audio_s: audio of one frame. running:
    the requests that have a slot, kept up to date by the owner, whose lock is held in every call.
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
        """Return the expected seconds of a prefill, 0 before one was measured."""
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
        """Return the requests whose next token is held back, each with its longest hold in seconds.

        This is rule 1. A frame, the first sample, or the end of a request may end a hold earlier.
        """
        if not self._shares_cores:
            return {}
        short = any(_is_short(live) for live in self._running)
        held = {}
        for live in lives:
            if not live.request.speak or live.speech_ended:
                continue
            ahead = live.text.written - len(live.codes)
            early = ahead > 0 or live.chunk_due if _starts(live) else ahead > 1 and short
            release_s = live.timestamps.progress_s + live.request.options.wait_timeout_s / 2
            if early and release_s - now > LEAST_HOLD_S:
                held[live] = release_s - now
        return held

    def held_speech_s(self, lives: Iterable[LiveRequest], now: float) -> dict[LiveRequest, float]:
        """Return the requests whose frames and chunks are held back, each with its longest hold.

        This is rule 4. A chunk, or the end of a request, may end a hold earlier.
        """
        held: dict[LiveRequest, float] = {}
        if not self._shares_cores or not any(self._soon_heard(live, now) for live in self._running):
            return held
        for live in lives:
            release_s = live.timestamps.progress_s + live.request.options.wait_timeout_s / 2
            chunk_s = max(0, live.chunk_wanted - live.waiting_frames) * (_frame_s(live) or 0.0)
            lasts_s = live.playback.left_s - chunk_s * MARGIN
            held_s = min(lasts_s - _short_s(live), release_s - now)
            if live.chunks and held_s > LEAST_HOLD_S:
                held[live] = held_s
        return held

    def prefill_hold_s(
        self, live: LiveRequest, rows: int, next_since_s: float, now: float
    ) -> float:
        """Return how long the next prompt may have to wait, 0 where its prefill may begin.

        This is rule 2. next_since_s: when it became the next prompt. A token, a frame, a chunk, or
        the end of a request may make it 0 earlier.
        """
        expected_s = self.expected_s(rows)
        late_s = live.request.arrived_s + live.request.options.first_token_timeout_s
        late_s -= expected_s * MARGIN
        left_s = min(next_since_s + expected_s, late_s) - now
        waits = left_s > LEAST_HOLD_S and any(
            0.0 < self._serving_s(other, expected_s) <= left_s
            for other in self._running
            if _speaks(other)
        )
        return left_s if waits else 0.0

    def is_pause(self, rows: int) -> bool:
        """Return whether so many rows may be prefilled ahead: rule 3."""
        # The requests that somebody waits for or listens to.
        running = [x for x in self._running if not x.ended and not x.request.ahead]
        if any(x.timestamps.first_token_s is None or _starts(x) for x in running):
            return False
        if any(_writes_alone(live) for live in running):
            return False
        expected_s = self.expected_s(rows)
        return all(not self._missing_s(live, expected_s) for live in running if _speaks(live))

    def _soon_heard(self, live: LiveRequest, now: float) -> bool:
        """Return whether a request is a starter whose caller reads, or its prefill ends soon."""
        if live.timestamps.first_token_s is not None:
            return _starts(live) and live.output.has_space_for_token
        called_s, request = live.called_s["thinker"], live.request
        if live.ended or not request.speak or request.ahead:
            return False
        begins_s = now if called_s is None else called_s
        rows = len(request.prompt) - live.prefilled_rows["thinker"]
        return begins_s + self.expected_s(rows) - now <= TOGETHER_S

    def _missing_s(self, live: LiveRequest, expected_s: float) -> float:
        """Return how much more audio a request needs until its next frame; 0 where it has enough.

        That frame comes after a prefill that takes expected_s.
        """
        lasts_s = live.playback.left_s
        if self._shares_cores:
            next_s = _frame_s(live) or 0.0
        elif live.text.closed or live.speech_ended:
            return 0.0
        else:
            next_s = self._step_s
            # Each token becomes a frame. The last frames wait where they do not fill a chunk.
            coming = live.text.written - live.decoded_frames - (live.chunk_wanted - 1)
            lasts_s += max(0, coming) * self._frame_audio_s
        return max(0.0, (expected_s + next_s) * MARGIN - lasts_s)

    def _serving_s(self, live: LiveRequest, expected_s: float) -> float:
        """Return the time until no audio is missing: 0 where none is missing, infinity if never.

        LEAST_HOLD_S stands for a time that is not known yet.
        """
        missing_s = self._missing_s(live, expected_s)
        if not missing_s:
            return 0.0
        if not self._shares_cores:
            if not (live.text.has_space and live.output.has_space_for_token):
                return math.inf  # its caller does not read
            return max(LEAST_HOLD_S, math.ceil(missing_s / self._frame_audio_s) * self._step_s)
        if not live.output.has_space_for_chunk:
            return math.inf
        frame_s = _frame_s(live)
        if _starts(live) or not frame_s:
            return LEAST_HOLD_S
        if frame_s >= self._frame_audio_s:
            return math.inf
        return missing_s / (self._frame_audio_s / frame_s - 1)


def _frame_s(live: LiveRequest) -> float | None:
    """Return the shortest of the last intervals between frames, None before there are two frames.

    Longer intervals may include a wait for another prompt, or for a request that has ended since.
    """
    intervals = [after - before for before, after in pairwise(live.frame_times)]
    return min(intervals) if intervals else None


def _speaks(live: LiveRequest) -> bool:
    """Return whether a request is a starter or a listener."""
    begun = live.request.speak and live.timestamps.first_token_s is not None
    return begun and not live.ended and not live.speech_over


def _starts(live: LiveRequest) -> bool:
    """Return whether a request is a starter."""
    return _speaks(live) and not live.chunks


def _is_short(live: LiveRequest) -> bool:
    """Return whether a request is a starter, or a listener with little audio."""
    if not _speaks(live) or not live.output.has_space_for_chunk:
        return False
    return live.playback.left_s < _short_s(live)


def _short_s(live: LiveRequest) -> float:
    """Return how many seconds of audio a listener must have not to be short."""
    frame_s = frame_pace(live.frame_times)
    return SHORT_S if frame_s is None else min(SHORT_S, SHORT_FRAMES * frame_s)


def _writes_alone(live: LiveRequest) -> bool:
    """Return whether a request writes text and has no speech, or no further speech."""
    return (not live.request.speak or live.speech_ended) and not live.text.closed
