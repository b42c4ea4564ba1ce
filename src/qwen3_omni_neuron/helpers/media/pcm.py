"""Plain PCM WAV, decoded at once in the caller's process, without a codec."""

import struct

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.helpers.media import work
from qwen3_omni_neuron.helpers.media.job import MIB, Admit, Decoded, Job, Measured, admit_all

MOST_BYTES = 4 * MIB  # 131 s of 16 kHz; at the lowest rate it becomes 16 MiB
_LEAST_RATE, _MOST_RATE = 8000, 192_000  # Hz; a lower one would become many more samples
_MOST_CHANNELS = 8
_CHUNK = struct.Struct("<4sI")
_FORMAT = struct.Struct("<HHIIHH")  # tag, channels, rate, bytes a second, bytes a frame, bits


def decode_inline(job: Job, admit: Admit = admit_all) -> Decoded | None:
    """Decode a small WAV of 16-bit PCM; return None for anything else, which the pool decodes.

    admit: see DecodingPool.decode. Takes a few milliseconds.
    Raises AudioError or PromptTooLongError as the pool does.
    """
    found = None if job.kind != "audio" else _samples(job.content)
    if found is None:
        return None
    samples, rate = found
    made = work.read_audio(job, {"audio": samples, "sampling_rate": rate}, admit)
    item = {"type": "audio", "audio": made, "sampling_rate": job.media.audio_rate}
    return Decoded(item, Measured(len(made) / job.media.audio_rate, 0, made.nbytes))


def _samples(content: bytes) -> tuple[NDArray[np.int16], int] | None:
    """Return the samples, [samples, channels], and their rate; None if they aren't plain PCM."""
    if len(content) > MOST_BYTES or content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        return None
    at, form = 12, None
    while at + _CHUNK.size <= len(content):
        name, size = _CHUNK.unpack_from(content, at)
        at += _CHUNK.size
        if size > len(content) - at:
            return None
        if name == b"fmt " and form is None and size >= _FORMAT.size:
            form = _FORMAT.unpack_from(content, at)
        elif name == b"data":
            return None if form is None else _plain(content, at, size, *form)
        at += size + size % 2
    return None


def _plain(
    content: bytes, at: int, size: int, tag: int, channels: int, rate: int, *rest: int
) -> tuple[NDArray[np.int16], int] | None:
    _, frame_bytes, bits = rest
    usual = tag == 1 and bits == 16 and 1 <= channels <= _MOST_CHANNELS
    if not usual or frame_bytes != 2 * channels or not _LEAST_RATE <= rate <= _MOST_RATE:
        return None
    frames = size // frame_bytes
    if frames <= channels:  # would be read as [channels, samples]
        return None
    samples = np.frombuffer(content, "<i2", frames * channels, at)
    return samples.reshape(frames, channels), rate
