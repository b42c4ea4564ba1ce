"""Samples of a reply as bytes of sound formats: raw PCM, WAV, FLAC, MP3 and Ogg Opus."""

import io
import struct

import numpy as np
from numpy.typing import NDArray

SOUND_FORMATS = ("wav", "mp3", "flac", "opus", "pcm16")
"""Formats of `encode_sound`."""
STREAMED_FORMATS = ("pcm16", "wav")
"""Formats whose parts can be made while the reply is, without an encoder's delay."""
MEDIA_TYPES = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "pcm16": "audio/pcm",
}
_LIBSNDFILE = {
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "flac": ("FLAC", "PCM_16"),
    "opus": ("OGG", "OPUS"),
}
_UNKNOWN_SIZE = 0xFFFFFFFF  # what players take for "until the end"
_HEADER_BYTES = 44


def pcm16(samples: NDArray[np.float32]) -> bytes:
    """Convert float32 samples in [-1, 1] to the bytes of 16-bit PCM, little-endian."""
    return np.rint(samples * 32767).astype("<i2").tobytes()


def wav_header(sample_rate: int, data_bytes: int | None = None) -> bytes:
    """Return the header of a mono 16-bit WAV. data_bytes: None while it is not known yet."""
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


def encode_sound(samples: NDArray[np.float32], sample_rate: int, sound_format: str) -> bytes:
    """Return a whole reply in one of SOUND_FORMATS. It is mono, and 16-bit where the format is PCM.

    Opus comes in an Ogg container, MP3 at libsndfile's own variable bit rate.
    """
    data = pcm16(samples)
    if sound_format == "pcm16":
        return data
    if sound_format == "wav":
        return wav_header(sample_rate, len(data)) + data
    import soundfile

    container, subtype = _LIBSNDFILE[sound_format]
    file = io.BytesIO()
    soundfile.write(
        file, np.frombuffer(data, "<i2"), sample_rate, format=container, subtype=subtype
    )
    return file.getvalue()
