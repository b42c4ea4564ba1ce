"""Speech synthesis by the espeak-ng library: words in, samples out."""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

# speak_lib.h of espeak-ng.
_SYNCHRONOUS = 2
_UTF8 = 1
_POSITION_CHARACTER = 1
_RATE, _VOLUME, _PITCH, _RANGE, _WORD_GAP = 1, 2, 3, 4, 7


@dataclass(frozen=True)
class Voice:
    """An espeak-ng voice and its settings.

    name: espeak-ng's, with the variant; pitch: 0..99, the middle; pitch_range: 0..99; gap: extra
    silence between words, in 10 ms.
    """

    name: str
    words_per_minute: int
    pitch: int
    pitch_range: int = 50
    gap: int = 0


# The voice of each speaker name.
VOICES = {
    "chelsie": Voice("en-us+f4", 165, 68, 30),
    "ethan": Voice("en-us+m3", 165, 22, 30),
    "aiden": Voice("en-gb-x-rp+m7", 175, 50, 30),
}


def speak(text: str, voice: Voice, rate: int) -> NDArray[np.float32]:
    """Speak `text`: float32 [samples] in -1..1 at `rate` Hz, silence at both ends cut.

    espeak-ng keeps its phase from one utterance to the next: the same words sound the same, but
    have equal samples only at the same place in the same sequence of calls.
    """
    library = _library()
    if library.espeak.espeak_SetVoiceByName(voice.name.encode()) != 0:
        raise ValueError(f"espeak-ng has no voice {voice.name!r}: `espeak-ng --voices` lists them.")
    for parameter, value in (
        (_RATE, voice.words_per_minute),
        (_VOLUME, 100),
        (_PITCH, voice.pitch),
        (_RANGE, voice.pitch_range),
        (_WORD_GAP, voice.gap),
    ):
        library.espeak.espeak_SetParameter(parameter, value, 0)
    library.blocks.clear()
    spoken = text.encode() + b"\0"
    library.espeak.espeak_Synth(spoken, len(spoken), 0, _POSITION_CHARACTER, 0, _UTF8, None, None)
    samples = np.concatenate(library.blocks).astype(np.float32) / np.float32(32768)
    return soxr.resample(trimmed(samples), library.rate, rate).astype(np.float32)


def trimmed(samples: NDArray[np.float32], floor: float = 0.004) -> NDArray[np.float32]:
    """Cut the samples below `floor` at both ends."""
    loud = np.flatnonzero(np.abs(samples) > floor)
    return samples[loud[0] : loud[-1] + 1] if len(loud) else samples[:0]


class _Library:
    """libespeak-ng, whose samples come through a callback."""

    def __init__(self) -> None:
        import espeakng_loader

        self.espeak: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        self.blocks: list[NDArray[np.int16]] = []
        path = str(espeakng_loader.get_data_path()).encode()
        self.rate: int = self.espeak.espeak_Initialize(_SYNCHRONOUS, 0, path, 0)
        if self.rate <= 0:
            raise RuntimeError(f"espeak-ng does not start: espeak_Initialize gave {self.rate}.")
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self._callback = kind(self._receive)  # kept alive: the library holds only the pointer
        self.espeak.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: Any, count: int, events: int) -> int:
        if samples and count > 0:
            self.blocks.append(np.ctypeslib.as_array(samples, shape=(count,)).copy())
        return 0


@lru_cache(maxsize=1)
def _library() -> _Library:
    return _Library()
