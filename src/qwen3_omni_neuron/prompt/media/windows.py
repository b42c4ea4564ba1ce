"""Windows of a sound, cut at pauses, without long silence.

Loudness is the variance of 50 ms in dB of full scale. Sound is above -70 dB, and above a level that
depends on the window and its lookahead:

- Room noise: if the quietest tenth is steady (within 3 dB) and the loudest stretch 15 dB above it,
sound is 10 dB above the noise, also in later windows without anything louder.
- Else sound is above -45 dB and at most 30 dB below the loudest stretch, or 10 dB above the
quietest tenth.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.prompt.media.audio import Waveform, check_length, waveform_blocks
from qwen3_omni_neuron.prompt.media.fields import Warn, ignore

_Powers = NDArray[np.float32]

SAMPLING_RATE = 16000  # the audio encoder's; files of other rates are resampled as they are read
TIMED_S = 8.0  # longest window of a transcript with times: the audio encoder's attention window
LEAST_LONGEST_S = 5.0  # shorter limits may leave no place to cut
_STRETCH = SAMPLING_RATE // 20
_PAUSE = 20  # stretches of silence that are left out: 1 s
_MARGIN = 4  # stretches of silence that stay beside sound
_SHORTEST = 20  # stretches of the shortest window without a pause
_CUT_SHARE = 0.25  # last share of a window without a pause, where it is cut
_FLOOR_DB, _LOUD_DB, _ABOVE_QUIET_DB, _BELOW_LOUDEST_DB = -70.0, -45.0, 10.0, 30.0
_STEADY_DB, _STANDS_OUT_DB = 3.0, 15.0
_NONE = np.empty(0, np.float32)


@dataclass(frozen=True)
class Window:
    """Part of a sound, transcribed independently.

    start_s, end_s: of its sound. samples: float32 [samples] at SAMPLING_RATE; may begin earlier and
    end later.
    """

    start_s: float
    end_s: float
    samples: Waveform

    @property
    def item(self) -> Mapping[str, Any]:
        """The samples as an audio item of a message."""
        return {"audio": self.samples, "sampling_rate": SAMPLING_RATE}


class GrowingWindows:
    """Windows of sound that arrives in pieces, each at most longest_s long.

    Longer sound is cut where its last quarter is quietest; silence of 1 s or more is left out.
    length, held: numbers of samples so far, and of samples not yet in a window.
    """

    def __init__(self, longest_s: float = TIMED_S, timed: bool = True):
        """timed: False for text alone: sound of at most longest_s is one window, pauses included.

        longest_s: LEAST_LONGEST_S or more.
        """
        self.length = self.held = 0
        self._most, self._timed = int(longest_s * SAMPLING_RATE) // _STRETCH, timed
        self._pieces: list[Waveform] = []
        self._silence = 0  # stretches of silence left out just before the buffered ones
        self._noise_level = _FLOOR_DB  # last level above room noise, in dB

    def push(self, samples: Waveform) -> list[Window]:
        """Return the windows completed by these samples at SAMPLING_RATE."""
        self.length += len(samples)
        self.held += len(samples)
        self._pieces.append(samples)
        return self._cut(False)

    def finish(self) -> list[Window]:
        """Return the remaining windows."""
        if not self.held or self._timed or self.length > self._most * _STRETCH:
            return self._cut(True)
        samples, self.held, self._pieces = self._joined(), 0, []
        loud = self._loud(_powers_of(samples))
        return [self._window(0, loud, samples)] if len(loud) else []

    def check(self, where: str) -> None:
        """Raise AudioError if the sound is too short to be transcribed."""
        check_length(self.length, SAMPLING_RATE, where)

    def _joined(self) -> Waveform:
        # A single piece may be a whole file: don't copy it.
        return self._pieces[0] if len(self._pieces) == 1 else np.concatenate([_NONE, *self._pieces])

    def _cut(self, ends: bool) -> list[Window]:
        reach = self._most + _SHORTEST
        if not ends and self.held < reach * _STRETCH:
            return []
        samples, first, found = self._joined(), self.length - self.held, list[Window]()
        powers, at = _powers_of(samples), 0
        while at < len(powers) and (ends or (at + reach) * _STRETCH <= len(samples)):
            part = powers[at : at + reach]
            loud, used = self._next(part, ends and at + reach >= len(powers))
            if len(loud):
                bounds = slice(at * _STRETCH, (at + used) * _STRETCH)
                found.append(self._window(first + bounds.start, loud, samples[bounds]))
            at += used
        self._pieces = [samples[at * _STRETCH :]]
        self.held = len(self._pieces[0])
        return found

    def _next(self, powers: _Powers, ends: bool) -> tuple[NDArray[np.intp], int]:
        """Return the first window's stretches of sound, and the number of stretches used.

        powers: of each stretch that the window may depend on. ends: no others follow.
        """
        loud = self._loud(powers)
        leaves_out = 0
        if not len(loud):
            leaves_out = len(powers) if ends else self._most
        elif loud[0] > _MARGIN and self._silence + loud[0] >= _PAUSE:
            leaves_out = int(loud[0]) - _MARGIN
        self._silence += leaves_out
        if leaves_out:
            return loud[:0], leaves_out
        silence = np.diff(loud, append=len(powers)) - 1
        before_pause = np.flatnonzero(silence >= _PAUSE)
        if len(before_pause):
            loud = loud[: before_pause[0] + 1]
            end = int(loud[-1]) + 1
            used = min(end + _MARGIN, self._most)
            self._silence = used - end
            return loud, used
        self._silence = 0
        used = len(powers) if ends and len(powers) <= self._most else self._quietest(powers)
        return loud[loud < used], used

    def _loud(self, powers: _Powers) -> NDArray[np.intp]:
        loudness = 10 * np.log10(powers + np.float32(1e-12))
        quietest, quiet, loudest = np.percentile(loudness, (2, 10, 100))
        level = quiet + _ABOVE_QUIET_DB
        if quiet - quietest < _STEADY_DB and loudest - quiet > _STANDS_OUT_DB:
            self._noise_level = level
        elif loudest > self._noise_level:
            level = min(level, max(loudest - _BELOW_LOUDEST_DB, _LOUD_DB))
        else:
            level = self._noise_level
        return np.flatnonzero(loudness > max(level, _FLOOR_DB))

    def _quietest(self, powers: _Powers) -> int:
        earliest = self._most - int(_CUT_SHARE * self._most)
        latest = min(self._most, len(powers) - _SHORTEST)
        beside = powers[earliest - 1 : latest] + powers[earliest : latest + 1]
        return earliest + int(beside.argmin())

    def _window(self, first: int, loud: NDArray[np.intp], samples: Waveform) -> Window:
        start, end = int(loud[0]) * _STRETCH, min((int(loud[-1]) + 1) * _STRETCH, len(samples))
        return Window((first + start) / SAMPLING_RATE, (first + end) / SAMPLING_RATE, samples)


def _powers_of(samples: Waveform) -> _Powers:
    """Return the power of each stretch; the last one may be shorter."""
    whole, rest = divmod(len(samples), _STRETCH)
    powers = samples[: whole * _STRETCH].reshape(whole, _STRETCH).var(axis=1)
    return np.append(powers, samples[len(samples) - rest :].var()) if rest else powers


def read_windows(
    audio: Mapping[str, Any], sound: GrowingWindows, where: str, warn: Warn = ignore
) -> Iterator[Window]:
    """Read an audio item block by block into empty `sound`; yield windows. Raises AudioError."""
    for block in waveform_blocks(audio, SAMPLING_RATE, where, warn=warn):
        yield from sound.push(block)
    yield from sound.finish()
