"""Gumbel noise of draws: a function of seed, stage, position, code and id.

The id with the largest sum of score and noise is a draw from softmax(scores), as in
torch.multinomial. SplitMix64's n-th number (Steele, Lea and Flood 2014) depends on seed and n
alone, so the order of draws does not matter. The host computes in float64 and rounds to float32, so
that no device's logarithm changes a bit.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Words = NDArray[np.uint64]
THINKER, TALKER = range(2)
"""Stages that draw; the talker's codes 0 and 1 to 15 share one."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


class Noise:
    """Noise of one stage of a request."""

    def __init__(self, seed: int, stage: int):
        words = np.random.SeedSequence(seed, spawn_key=(stage,)).generate_state(1, np.uint64)
        self._start = int(words[0])

    def at(self, position: int) -> int:
        """Return the start of a token's or frame's noise."""
        return (self._start + position * 256 * int(_STEP)) % 2**64


def noise_of_rows(starts: list[int], ids: list[NDArray[np.int64]]) -> Floats:
    """Return the noise of several rows' `ids` of a token or code 0, concatenated."""
    streams = split_mix(np.array(starts, np.uint64)).repeat([len(each) for each in ids])
    return _gumbel(streams, np.concatenate(ids).astype(np.uint64))


def noise_of_frame(start: int, codes: int, vocab: int) -> Floats:
    """Return the noise of a frame's codes 1 to `codes` for every id, [codes, vocab]."""
    starts = np.uint64(start) + np.arange(1, codes + 1, dtype=np.uint64) * _STEP
    return _gumbel(split_mix(starts)[:, None], np.arange(vocab, dtype=np.uint64))


def split_mix(x: Words) -> Words:
    """Replace states by SplitMix64's numbers."""
    shifted = x >> _SHIFTS[0]
    x ^= shifted
    x *= _FACTORS[0]
    x ^= np.right_shift(x, _SHIFTS[1], out=shifted)
    x *= _FACTORS[1]
    x ^= np.right_shift(x, _SHIFTS[2], out=shifted)
    return x


def _gumbel(streams: Words, ids: Words) -> Floats:
    words = split_mix(streams + (ids + np.uint64(1)) * _STEP)
    words >>= np.uint64(12)  # with 0.5 added, 52 bits are exact in float64, never 0 or 1
    uniform = words + 0.5
    uniform *= 2.0**-52
    for _ in range(2):
        np.negative(np.log(uniform, out=uniform), out=uniform)
    return uniform.astype(np.float32)
