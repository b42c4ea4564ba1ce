"""Time stretching of a reply's samples."""

from fractions import Fraction
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

_SLOWEST_TEMPO = 0.5  # lower limit of one atempo filter
_TEMPO_END_S = 0.25


def can_stretch() -> bool:
    """Return whether the packages of `Tempo`, in the extra `video`, are installed."""
    return find_spec("av") is not None


class Tempo:
    """Streaming time stretch of speech: faster or slower, at the same pitch.

    FFmpeg's atempo does it. factor: 0.25 to 4, above 1 is faster; the result is 1 / factor as long.
    Raises ImportError where PyAV is not installed.
    """

    def __init__(self, factor: float, sample_rate: int):
        from av.filter import Graph

        self._factor, self._rate = factor, sample_rate
        self._samples = self._made_samples = 0
        self._graph = Graph()
        factors = [factor]
        if factor < _SLOWEST_TEMPO:
            factors = [_SLOWEST_TEMPO, factor / _SLOWEST_TEMPO]
        nodes = [
            self._graph.add_abuffer(
                format="flt",
                sample_rate=sample_rate,
                layout="mono",
                time_base=Fraction(1, sample_rate),
            ),
            *(self._graph.add("atempo", f"{tempo:.9f}") for tempo in factors),
            self._graph.add("abuffersink"),
        ]
        self._graph.link_nodes(*nodes).configure()

    def push(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Add samples, and return the stretched samples that are ready."""
        from av import AudioFrame

        if not len(samples):
            return samples
        frame = AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._samples
        frame.time_base = Fraction(1, self._rate)
        self._samples += len(samples)
        self._graph.push(frame)
        return self._made()

    def finish(self) -> NDArray[np.float32]:
        """Return the last samples."""
        left = round(self._samples / self._factor) - self._made_samples
        # atempo drops the end of its input: append silence for it to drop.
        made = self.push(np.zeros(int(_TEMPO_END_S * self._rate), np.float32))
        self._graph.push(None)
        return np.concatenate([made, self._made()])[: max(left, 0)]

    def _made(self) -> NDArray[np.float32]:
        made = [np.zeros(0, np.float32)]
        while True:
            try:
                made.append(self._graph.pull().to_ndarray()[0])
            except (BlockingIOError, EOFError):  # no more samples for now, or at the end
                break
        samples = np.concatenate(made)
        self._made_samples += len(samples)
        return samples
