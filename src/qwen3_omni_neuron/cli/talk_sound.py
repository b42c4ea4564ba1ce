"""Sound of `talk`: microphone and loudspeaker by sounddevice, or files where there is no device."""

import threading
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import NotInstalledError, OptionError, OutputError
from qwen3_omni_neuron.events import SAMPLE_RATE
from qwen3_omni_neuron.sound.speech_file import SpeechFile

Samples = NDArray[np.float32]
HEARD_RATE = 16000  # sample rate of the user's sound
_PIECE_S = 0.02
_AGAIN_S = 0.12  # seconds of sound to buffer after an underrun before playing again
_DEAD_S = 2.0  # time limit between calls of the loudspeaker, which come every _PIECE_S
_FILES = "Without a device, take --from FILE and --to FILE."


class Player:
    """Queue between a conversation and a loudspeaker. The lock guards all fields.

    file: gets the samples instead of a loudspeaker. latency_s: seconds from a call of `fill` until
    its samples are heard.
    """

    def __init__(self, file: SpeechFile | None = None):
        self.latency_s, self.underruns, self._file = 0.0, 0, file
        self._lock = threading.Condition()
        self._left = np.empty(0, np.float32)  # samples still to play
        self._played = 0  # samples of this answer that were played
        self._ended, self._waiting = True, False

    def push(self, samples: Samples) -> None:
        """Append samples at SAMPLE_RATE. The first samples after `end` begin a new answer."""
        if self._file is not None:
            self._file.write(samples)  # and none are left to play or interrupt
            return
        with self._lock:
            if self._ended:
                self._played, self._ended = -len(self._left), False
            self._left = np.concatenate((self._left, samples))

    def end(self) -> None:
        """Mark the end of this answer's samples."""
        with self._lock:
            self._ended, self._waiting = True, False

    def interrupt(self) -> float | None:
        """Stop playback. Returns the seconds of the answer that were heard, None if all were."""
        with self._lock:
            heard_s = max(0.0, self._played / SAMPLE_RATE - self.latency_s)
            playing = len(self._left) > 0 or not self._ended
            self._left = self._left[:0]
            self._ended, self._waiting = True, False
            return heard_s if playing else None

    def drain(self) -> None:
        """Wait until all is played. Raises OutputError where the loudspeaker stops taking sound."""
        with self._lock:
            while len(self._left):
                if not self._lock.wait(_DEAD_S):
                    left_s = len(self._left) / SAMPLE_RATE
                    raise OutputError(
                        f"the loudspeaker has taken no sound for {_DEAD_S:g} s, and {left_s:.1f} s "
                        "of the answer were not played. Check the device, or take --to FILE."
                    )

    def fill(self, out: Samples, *_: object) -> None:
        """Write the next samples into a loudspeaker's buffer [n, 1]; fill the rest with silence."""
        with self._lock:
            out[:] = 0
            if self._waiting and len(self._left) < _AGAIN_S * SAMPLE_RATE:
                return
            ready, self._left = np.split(self._left, [len(out)])
            out[: len(ready), 0] = ready
            self._played += len(ready)
            self._waiting = len(ready) < len(out) and not self._ended
            self.underruns += self._waiting
            self._lock.notify_all()


def device(name: Literal["microphone", "loudspeaker"], callback: Callable[..., None]) -> Any:
    """Open a device. Returns sounddevice's stream: it calls `callback` within its `with` block.

    Raises NotInstalledError, and OptionError where there is none.
    """
    try:
        import sounddevice

        rate = HEARD_RATE if name == "microphone" else SAMPLE_RATE
        stream = sounddevice.InputStream if name == "microphone" else sounddevice.OutputStream
        form = {"samplerate": rate, "channels": 1, "dtype": "float32", "latency": "low"}
        return stream(**form, blocksize=round(_PIECE_S * rate), callback=callback)
    except (ImportError, OSError) as error:
        raise NotInstalledError(
            f"the {name} needs sounddevice (pip install 'qwen3-omni-neuron[talk]') and the library "
            f"PortAudio (apt-get install libportaudio2): {error}. {_FILES}"
        ) from error
    except (sounddevice.PortAudioError, ValueError) as error:
        raise OptionError(f"there is no {name} that can be opened: {error}. {_FILES}") from error
