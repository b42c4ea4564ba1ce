"""Encoding of a reply's samples as raw PCM, WAV, FLAC, MP3 or Ogg Opus, and time stretching."""

import io
import struct
from fractions import Fraction
from importlib.util import find_spec
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

SOUND_FORMATS = ("wav", "mp3", "flac", "opus", "pcm16")
"""Formats of `SoundWriter`."""
STREAMED_FORMATS = ("pcm16", "wav")
"""Formats that can be streamed while the reply is generated, without an encoder's delay."""
MEDIA_TYPES = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "pcm16": "audio/pcm",
}
_LIBSNDFILE = {
    "wav": {"format": "WAV", "subtype": "PCM_16"},
    "mp3": {"format": "MP3", "subtype": "MPEG_LAYER_III"},
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
    "opus": {"format": "OGG", "subtype": "OPUS"},
    "pcm16": {"format": "RAW", "subtype": "PCM_16", "endian": "LITTLE"},
}
_UNKNOWN_SIZE = 0xFFFFFFFF  # players read it as "until the end"
_HEADER_BYTES = 44
_SLOWEST_TEMPO = 0.5  # lower limit of one atempo filter
_TEMPO_END_S = 0.25
# For larger arrays numpy releases the GIL. The server's event loop would then wait for the stages'
# threads to give it back, which takes longer than a few more operations.
_UNRELEASED = 500
_FEW_SAMPLES = 8000  # a first chunk, which the listener waits for, has fewer


def pcm16(samples: NDArray[np.float32]) -> bytes:
    """Convert float32 [samples] in [-1, 1] to the bytes of 16-bit PCM, little-endian."""
    size = _UNRELEASED if len(samples) <= _FEW_SAMPLES else len(samples)
    parts = [samples[at : at + size] for at in range(0, len(samples), size)]
    return b"".join([np.rint(part * 32767).astype("<i2").tobytes() for part in parts])


def samples_of_pcm16(data: bytes) -> NDArray[np.float32]:
    """Convert the bytes of 16-bit PCM, little-endian, to float32 [samples] in [-1, 1)."""
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)


def wav_header(sample_rate: int, data_bytes: int | None = None) -> bytes:
    """Return the header of a mono 16-bit WAV. data_bytes: None if the size is not known yet."""
    size = _UNKNOWN_SIZE if data_bytes is None else data_bytes
    whole = _UNKNOWN_SIZE if data_bytes is None else data_bytes + _HEADER_BYTES - 8
    form = (1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return b"".join(
        (
            b"RIFF" + struct.pack("<I", whole) + b"WAVE",
            b"fmt " + struct.pack("<IHHIIHH", 16, *form),
            b"data" + struct.pack("<I", size),
        )
    )


class SoundWriter:
    """Encoder of samples into a file, in mono, and in 16 bits if the format is lossless.

    Opus comes in an Ogg container, MP3 at libsndfile's own variable bit rate.
    """

    def __init__(self, file: bytes | BinaryIO, sample_rate: int, sound_format: str):
        """file: its path, or an open file. sound_format: one of SOUND_FORMATS.

        Raises soundfile.SoundFileError, as do the methods.
        """
        import soundfile

        form = _LIBSNDFILE[sound_format]
        self._file = soundfile.SoundFile(file, "w", sample_rate, 1, **form)

    def write(self, samples: NDArray[np.float32]) -> None:
        """Append float32 [samples] in [-1, 1]."""
        self._file.write(np.frombuffer(pcm16(samples), "<i2"))

    def close(self) -> None:
        """Complete the file."""
        self._file.close()


def encode_sound(samples: NDArray[np.float32], sample_rate: int, sound_format: str) -> bytes:
    """Encode a whole reply in one of SOUND_FORMATS."""
    file = io.BytesIO()
    writer = SoundWriter(file, sample_rate, sound_format)
    writer.write(samples)
    writer.close()
    return file.getvalue()


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
