"""Speech synthesis by the espeak-ng library: words in, samples out."""

import ctypes
import itertools
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
_LIST_ENDS, _WORD = 0, 1


class _Event(ctypes.Structure):
    """espeak_EVENT."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_void_p),
    )


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
    return speak_words(text, voice, rate)[0]


def speak_word(word: str, voice: Voice, rate: int) -> NDArray[np.float32]:
    """Speak a word of a reply. Alone, "a" would be the letter, which sounds like "eight"."""
    return speak("uh" if word == "a" else word, voice, rate)


def speak_words(text: str, voice: Voice, rate: int) -> tuple[NDArray[np.float32], dict[int, float]]:
    """Return what `speak` does, and the onset in seconds of each word, by its first character.

    espeak-ng joins some words, such as "of the": only the first of them has an onset.
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
    library.words.clear()
    spoken = text.encode() + b"\0"
    library.espeak.espeak_Synth(spoken, len(spoken), 0, _POSITION_CHARACTER, 0, _UTF8, None, None)
    samples = np.concatenate(library.blocks).astype(np.float32) / np.float32(32768)
    first, end = _loud(samples)
    onsets_s = {at: (sample - first) / library.rate for at, sample in library.words}
    return soxr.resample(samples[first:end], library.rate, rate).astype(np.float32), onsets_s


def trimmed(samples: NDArray[np.float32], floor: float = 0.004) -> NDArray[np.float32]:
    """Cut the samples below `floor` at both ends."""
    first, end = _loud(samples, floor)
    return samples[first:end]


def _loud(samples: NDArray[np.float32], floor: float = 0.004) -> tuple[int, int]:
    """Return the first sample above `floor`, and the one after the last; 0 and 0 if none is."""
    loud = np.flatnonzero(np.abs(samples) > floor)
    return (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (0, 0)


class _Library:
    """libespeak-ng, whose samples come through a callback.

    words: first character and first sample of each word spoken.
    """

    def __init__(self) -> None:
        import espeakng_loader

        self.espeak: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        self.blocks: list[NDArray[np.int16]] = []
        self.words: list[tuple[int, int]] = []
        path = str(espeakng_loader.get_data_path()).encode()
        self.rate: int = self.espeak.espeak_Initialize(_SYNCHRONOUS, 0, path, 0)
        if self.rate <= 0:
            raise RuntimeError(f"espeak-ng does not start: espeak_Initialize gave {self.rate}.")
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
        )
        self._callback = kind(self._receive)  # kept alive: the library holds only the pointer
        self.espeak.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self.blocks.append(np.ctypeslib.as_array(samples, shape=(count,)).copy())
        for event in itertools.takewhile(lambda event: event.type != _LIST_ENDS, events):
            if event.type == _WORD:
                self.words.append((event.text_position - 1, event.sample))
        return 0


@lru_cache(maxsize=1)
def _library() -> _Library:
    return _Library()
