"""Encoding and time stretching of a reply's samples, by FFmpeg's libraries."""

import asyncio
import io
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
from av.filter import Graph
from numpy.typing import NDArray

from qwen3_omni_neuron.events import SAMPLE_RATE
from qwen3_omni_neuron.events.encoding import pcm16, wav_header

MEDIA_TYPES = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm16": "audio/pcm",
}
# Container, codec and its options. MP3 without its bit reservoir, for which frames wait.
_CODECS: dict[str, tuple[str, str, dict[str, str]]] = {
    "mp3": ("mp3", "libmp3lame", {"b": "96000", "reservoir": "0", "compression_level": "7"}),
    "opus": ("ogg", "libopus", {"b": "64000"}),
    "aac": ("adts", "aac", {"b": "64000"}),
    "flac": ("flac", "flac", {}),
}
_CONTAINER = {
    "flush_packets": "1",
    "fflags": "+bitexact",  # Ogg: no random number in each page
    "page_duration": "20000",  # Ogg: microseconds; one packet a page
    "id3v2_version": "0",  # MP3: no tag before the sound
}
_AAC_FRAME = 1024  # samples
_SLOWEST_TEMPO = 0.5  # lower limit of one atempo filter
_TEMPO_END_S = 0.25


class SoundEncoder:
    """Streaming encoder of mono samples at SAMPLE_RATE into a file.

    slow: a call takes some milliseconds per second of sound.
    """

    def __init__(self, sound_format: str, whole: bool = False):
        """sound_format: a key of MEDIA_TYPES.

        whole: all bytes leave at the end, with the length in the header if the format has one.
        """
        self._file = io.BytesIO()
        self._whole, self._ready = whole, list[bytes]()
        self._wav = sound_format == "wav"
        self.slow = sound_format in _CODECS
        if self.slow:
            container, codec, options = _CODECS[sound_format]
            file: Any = self._file if whole else SimpleNamespace(write=self._ready.append)
            self._container = av.open(file, "w", format=container, container_options=_CONTAINER)
            self._stream: Any = self._container.add_stream(
                codec, SAMPLE_RATE, options, layout="mono"
            )
            if sound_format == "aac":  # so that the first chunk fills a frame
                self.push(np.zeros(_AAC_FRAME, np.float32))
        elif self._wav and not whole:
            self._ready.append(wav_header(SAMPLE_RATE))

    def push(self, samples: NDArray[np.float32]) -> bytes:
        """Add float32 [samples] in [-1, 1]. Returns the bytes that are ready."""
        sound = pcm16(samples)
        if not self.slow:
            self._ready.append(sound)
        elif sound:
            frame = _frame(np.frombuffer(sound, "<i2"), "s16")
            self._container.mux(self._stream.encode(frame))
        return b"" if self._whole or not sound else self._taken()

    async def encode(self, samples: NDArray[np.float32]) -> bytes:
        """Push samples, in a thread if that is slow."""
        return await asyncio.to_thread(self.push, samples) if self.slow else self.push(samples)

    def finish(self) -> bytes:
        """Return the last bytes, or all of them."""
        if self.slow:
            self._container.mux(self._stream.encode(None))
            self._container.close()
        sound = self._file.getvalue() + self._taken()
        header = self._wav and self._whole
        return wav_header(SAMPLE_RATE, len(sound)) + sound if header else sound

    def _taken(self) -> bytes:
        taken = b"".join(self._ready)
        self._ready.clear()
        return taken


def encode_sound(samples: NDArray[np.float32], sound_format: str) -> bytes:
    """Return a whole reply's file."""
    encoder = SoundEncoder(sound_format, whole=True)
    encoder.push(samples)
    return encoder.finish()


def _frame(samples: NDArray[Any], sample_format: str) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples[None], format=sample_format, layout="mono")
    frame.sample_rate = SAMPLE_RATE
    return frame


class Tempo:
    """Streaming time stretch of speech by FFmpeg's atempo, at the same pitch.

    factor: 0.25 to 4, above 1: faster; the result is 1 / factor as long.
    """

    def __init__(self, factor: float):
        self._factor = factor
        self._samples = self._made_samples = 0
        self._graph = Graph()
        factors = [factor]
        if factor < _SLOWEST_TEMPO:
            factors = [_SLOWEST_TEMPO, factor / _SLOWEST_TEMPO]
        nodes = [
            self._graph.add_abuffer(
                format="flt",
                sample_rate=SAMPLE_RATE,
                layout="mono",
                time_base=Fraction(1, SAMPLE_RATE),
            ),
            *(self._graph.add("atempo", f"{tempo:.9f}") for tempo in factors),
            self._graph.add("abuffersink"),
        ]
        self._graph.link_nodes(*nodes).configure()

    def push(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Add samples; return the stretched samples that are ready."""
        if not len(samples):
            return samples
        frame = _frame(samples, "flt")
        frame.pts, frame.time_base = self._samples, Fraction(1, SAMPLE_RATE)
        self._samples += len(samples)
        self._graph.push(frame)
        return self._made()

    def finish(self) -> NDArray[np.float32]:
        """Return the last samples."""
        left = round(self._samples / self._factor) - self._made_samples
        # atempo drops the end of its input: append silence.
        made = self.push(np.zeros(int(_TEMPO_END_S * SAMPLE_RATE), np.float32))
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
