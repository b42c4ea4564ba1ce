"""A microphone and a loudspeaker that replace sounddevice's, in real time."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

SOUND = 1e-3


class PortAudioError(Exception):
    """Error of sounddevice."""


class SoundDevices:
    """Module `sounddevice`, as far as `talk` uses it. missing: kind of stream that can't be opened.

    heard: blocks that the loudspeaker got so far. dies_after_s: seconds of sound after which the
    loudspeaker takes nothing more.
    """

    PortAudioError = PortAudioError

    def __init__(self, missing: str = ""):
        self._missing = missing
        self._said: deque[NDArray[np.float32]] = deque()
        self.heard: list[NDArray[np.float32]] = []
        self.dies_after_s = math.inf

    def say(self, samples: NDArray[np.float32]) -> None:
        """Play samples into the microphone, at its rate."""
        self._said.extend(np.array_split(samples, max(1, len(samples) // 320)))

    @property
    def silent(self) -> bool:
        """True once all samples were played."""
        return not self._said

    def sounded_s(self, since: int = 0) -> float:
        """Return the seconds with sound in the loudspeaker's blocks, from block `since` on."""
        return 0.02 * sum(np.abs(block).max() > SOUND for block in self.heard[since:])

    def InputStream(self, **given: Any) -> "_Stream":  # noqa: N802
        def step(callback: Callable[..., None], blocksize: int) -> None:
            samples = self._said.popleft() if self._said else np.zeros(blocksize, np.float32)
            callback(samples[:, None], len(samples), None, None)

        return self._open("microphone", given, step)

    def OutputStream(self, **given: Any) -> "_Stream":  # noqa: N802
        def step(callback: Callable[..., None], blocksize: int) -> None:
            if self.sounded_s() >= self.dies_after_s:
                return
            out = np.full((blocksize, 1), np.nan, np.float32)
            callback(out, blocksize, None, None)
            self.heard.append(out[:, 0])

        return self._open("loudspeaker", given, step)

    def _open(self, kind: str, given: dict[str, Any], step: Callable[..., None]) -> "_Stream":
        if kind == self._missing:
            raise PortAudioError("Error querying device -1")
        return _Stream(given, step)


class _Stream:
    latency = 0.01

    def __init__(self, given: dict[str, Any], step: Callable[..., None]):
        self._given, self._step = given, step
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        size, next_s = self._given["blocksize"], time.monotonic()
        while not self._ends.is_set():
            self._step(self._given["callback"], size)
            next_s += size / self._given["samplerate"]
            time.sleep(max(0.0, next_s - time.monotonic()))

    def __enter__(self) -> "_Stream":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
