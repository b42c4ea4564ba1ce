"""Plain PCM WAV, which is decoded in the caller's process, without a codec."""

import io
import wave

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.helpers.job import MIB, Admit, Decoded, Job, Measured, admit_all
from qwen3_omni_neuron.helpers.media_work import read_audio

MOST_BYTES = 4 * MIB  # 131 s of 16 kHz; at the lowest rate it becomes 16 MiB
_LEAST_RATE, _MOST_RATE = 8000, 192_000  # Hz; a lower one would become many more samples
_MOST_CHANNELS = 8


def decode_inline(job: Job, admit: Admit = admit_all) -> Decoded | None:
    """Decode a small WAV of 16-bit PCM; return None for anything else, which the pool decodes.

    admit: see DecodingPool.decode. Takes a few milliseconds.
    Raises AudioError or PromptTooLongError as the pool does.
    """
    content = job.content
    found = _samples(content) if job.kind == "audio" and isinstance(content, bytes) else None
    if found is None:
        return None
    samples, rate = found
    warnings: list[str] = []
    given = {**job.options, "audio": samples, "sampling_rate": rate}
    made = read_audio(job, given, admit, warnings.append)
    item = {"type": "audio", "audio": made, "sampling_rate": job.media.audio_rate}
    measured = Measured(len(made) / job.media.audio_rate, 0, made.nbytes)
    return Decoded(item, measured, tuple(warnings))


def _samples(content: bytes) -> tuple[NDArray[np.int16], int] | None:
    """Return the samples, [samples, channels], and their rate; None if they aren't plain PCM."""
    whole = int.from_bytes(content[4:8], "little") + 8 == len(content) <= MOST_BYTES
    if not whole or content[12:16] != b"fmt " or content[20:22] != b"\1\0":  # WAVE_FORMAT_PCM
        return None
    try:
        with wave.open(io.BytesIO(content)) as file:
            form, data = file.getparams(), file.readframes(file.getnframes())
    except (wave.Error, EOFError):
        return None
    channels, rate, frames = form.nchannels, form.framerate, form.nframes
    frame_bytes = int.from_bytes(content[32:34], "little")
    usual = form.sampwidth == 2 and channels <= _MOST_CHANNELS and frame_bytes == 2 * channels
    if not usual or not _LEAST_RATE <= rate <= _MOST_RATE or len(data) != 2 * frames * channels:
        return None
    if frames <= channels:  # would be read as [channels, samples]
        return None
    return np.frombuffer(data, "<i2").reshape(frames, channels), rate
