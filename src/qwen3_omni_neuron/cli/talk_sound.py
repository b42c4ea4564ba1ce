"""Sound of `talk`: microphone and loudspeaker by sounddevice, or files where there is no device."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from qwen3_omni_neuron.cli.wav import WavFile
from qwen3_omni_neuron.errors import NotInstalledError, OptionError, OutputError
from qwen3_omni_neuron.events import SAMPLE_RATE

Samples = NDArray[np.float32]
HEARD_RATE = 16000  # sample rate of the user's sound
PIECE_S = 0.02
_AGAIN_S = 0.12  # seconds of sound to buffer after an underrun before playing again
_DEAD_S = 2.0  # time limit between calls of the loudspeaker, which come every PIECE_S
_FILES = "Without a device, take --from FILE and --to WAV."


class FileSink(WavFile):
    """WAV file in place of a loudspeaker; it has the methods of a Player."""

    underruns = 0

    def __init__(self, path: Path):
        super().__init__(path, SAMPLE_RATE)

    def push(self, samples: Samples) -> None:
        """Append samples at SAMPLE_RATE."""
        self.write(samples)

    def end(self) -> None:
        """Do nothing: a file has no playback."""

    def interrupt(self) -> float | None:
        """Return None: samples that were written stay in the file."""
        return None

    def drain(self) -> None:
        """Do nothing: a file has no playback."""


class Player:
    """Queue between a conversation and a loudspeaker. The lock guards all fields.

    latency_s: seconds from a call of `fill` until its samples are heard.
    """

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.underruns = 0
        self._lock = threading.Condition()
        self._pieces: deque[Samples] = deque()
        self._left = self._played = 0  # samples of this answer still to play, and played
        self._ended = self._waiting = True

    def push(self, samples: Samples) -> None:
        """Append samples at SAMPLE_RATE. The first samples after `end` begin a new answer."""
        with self._lock:
            if self._ended:
                self._played, self._ended, self._waiting = -self._left, False, False
            self._pieces.append(samples)
            self._left += len(samples)

    def end(self) -> None:
        """Mark the end of this answer's samples."""
        with self._lock:
            self._ended, self._waiting = True, False

    def interrupt(self) -> float | None:
        """Stop playback. Returns the seconds of the answer that were heard, None if all were."""
        with self._lock:
            heard_s = max(0.0, self._played / SAMPLE_RATE - self.latency_s)
            playing = self._left > 0 or not self._ended
            self._pieces.clear()
            self._left, self._ended = 0, True
            self._lock.notify_all()
            return heard_s if playing else None

    def drain(self) -> None:
        """Wait until all is played. Raises OutputError where the loudspeaker stops taking sound."""
        with self._lock:
            while self._left:
                if not self._lock.wait(_DEAD_S):
                    raise OutputError(
                        f"the loudspeaker has taken no sound for {_DEAD_S:g} s, and "
                        f"{self._left / SAMPLE_RATE:.1f} s of the answer were not played. Check "
                        "the device, or take --to WAV."
                    )

    def fill(self, out: Samples) -> None:
        """Write the next samples into a loudspeaker's buffer; fill the rest with silence."""
        with self._lock:
            out[:] = 0
            if self._waiting and self._left < _AGAIN_S * SAMPLE_RATE:
                return
            self._waiting = False
            filled = 0
            while filled < len(out) and self._pieces:
                piece = self._pieces.popleft()
                part = piece[: len(out) - filled]
                out[filled : filled + len(part)] = part
                filled += len(part)
                if len(part) < len(piece):
                    self._pieces.appendleft(piece[len(part) :])
            self._left -= filled
            self._played += filled
            if filled < len(out) and not self._ended:
                self.underruns += 1
                self._waiting = True
            self._lock.notify_all()


Sink = Player | FileSink


@contextmanager
def loudspeaker() -> Iterator[Player]:
    """Open the loudspeaker. Raises NotInstalledError, and OptionError where there is none."""
    player = Player()

    def fill(out: NDArray[np.float32], *_: object) -> None:
        player.fill(out[:, 0])

    with _stream("OutputStream", SAMPLE_RATE, fill, "loudspeaker") as stream:
        player.latency_s = float(stream.latency)
        yield player


@contextmanager
def microphone(hear: Callable[[Samples], None]) -> Iterator[None]:
    """Open the microphone. hear: called with PIECE_S of sound at HEARD_RATE, in a device thread.

    Raises NotInstalledError, and OptionError where there is none.
    """

    def take(samples: NDArray[np.float32], *_: object) -> None:
        hear(samples[:, 0].copy())

    with _stream("InputStream", HEARD_RATE, take, "microphone"):
        yield


@contextmanager
def _stream(kind: str, rate: int, callback: Callable[..., None], name: str) -> Iterator[Any]:
    try:
        import sounddevice
    except ImportError as error:
        raise NotInstalledError(
            f"the {name} needs sounddevice: pip install 'qwen3-omni-neuron[talk]'. {_FILES}"
        ) from error
    except OSError as error:
        raise NotInstalledError(
            f"the {name} needs the library PortAudio (apt-get install libportaudio2): {error}. "
            f"{_FILES}"
        ) from error
    try:
        stream = getattr(sounddevice, kind)(
            samplerate=rate,
            channels=1,
            dtype="float32",
            blocksize=round(PIECE_S * rate),
            latency="low",
            callback=callback,
        )
    except (sounddevice.PortAudioError, ValueError) as error:
        raise OptionError(f"there is no {name} that can be opened: {error}. {_FILES}") from error
    with stream:
        yield stream


def read_speech(file: Path) -> Samples:
    """Return a sound file's samples at HEARD_RATE, channels mixed. Raises OptionError."""
    try:
        samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise OptionError(f"--from {file} can't be read: {error}") from error
    mono = samples.mean(axis=1)
    if rate == HEARD_RATE:
        return mono
    import soxr

    return soxr.resample(mono, rate, HEARD_RATE)
