"""Encoding of samples as 16-bit PCM, and into the file of a reply's speech."""

import struct
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

_LIBSNDFILE = {
    "wav": {"format": "WAV", "subtype": "PCM_16"},
    "mp3": {"format": "MP3", "subtype": "MPEG_LAYER_III"},
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
    "opus": {"format": "OGG", "subtype": "OPUS"},
    "pcm16": {"format": "RAW", "subtype": "PCM_16", "endian": "LITTLE"},
}
_UNKNOWN_SIZE = 0xFFFFFFFF  # players read it as "until the end"
_HEADER_BYTES = 44
# For larger arrays numpy releases the GIL; the server's event loop would wait longer for it than
# the conversion takes.
_UNRELEASED = 500
_FEW_SAMPLES = 8000  # a first chunk has fewer


def pcm16(samples: NDArray[np.float32]) -> bytes:
    """Convert float32 [samples] in [-1, 1] to 16-bit PCM, little-endian."""
    size = _UNRELEASED if len(samples) <= _FEW_SAMPLES else len(samples)
    parts = [samples[at : at + size] for at in range(0, len(samples), size)]
    return b"".join([np.rint(part * 32767).astype("<i2").tobytes() for part in parts])


def samples_of_pcm16(data: bytes) -> NDArray[np.float32]:
    """Convert 16-bit PCM, little-endian, to float32 [samples] in [-1, 1)."""
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)


def wav_header(sample_rate: int, data_bytes: int | None = None) -> bytes:
    """Return the header of a mono 16-bit WAV. data_bytes: None if unknown."""
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
    """Encoder of mono samples into a file, in 16 bits if lossless; Opus in Ogg."""

    def __init__(self, file: bytes | BinaryIO, sample_rate: int, sound_format: str):
        """file: its path, or an open file. sound_format: a key of _LIBSNDFILE.

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
