"""Sound as the caller has it -> mono float32 at the model's rate, checked, block by block."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import soxr

from qwen3_omni_neuron.errors import AudioError, PromptTooLongError
from qwen3_omni_neuron.media.audio_blocks import Sound, Waveform, open_sound

MIN_SECONDS = 0.03  # shorter than this gives less than a handful of mel frames: nothing to hear


def load_waveform(
    item: Mapping[str, Any], rate: int, where: str, limit_s: float = math.inf
) -> Waveform:
    """The sound of one audio item of a message, mono float32 [samples] at `rate` Hz.

    item["audio"] is a path, the bytes of a sound file, an array [samples] or [samples, channels]
    (with item["sampling_rate"]; integers are scaled by their range), (array, rate), or an iterator
    of such arrays, alike in channels: sound that is still arriving, taken as it comes to its end.
    where: names the item in errors, e.g. "messages[0].content[1]".
    What lies in memory besides the result is a block, whatever the length, rate and channels.
    Raises PromptTooLongError when it is longer than limit_s: of a file or an array before anything
    is decoded, else as soon as more than that was heard. Raises AudioError when it can't be read,
    is empty, too short, or holds NaN or infinity.
    """
    sound = open_sound(item, where)
    if sound.seconds is not None and sound.seconds > limit_s:
        raise _too_long(where, f"lasts {sound.seconds:.3f} s", limit_s)
    stream = soxr.ResampleStream(sound.rate, rate, 1) if sound.rate != rate else None
    collected = bytearray()  # grows in place; a list of blocks would lie in memory twice at its end
    samples = 0
    for block in _heard(sound, where, limit_s):
        samples += len(block)
        collected += (block if stream is None else stream.resample_chunk(block)).tobytes()
    seconds = samples / sound.rate
    if seconds < MIN_SECONDS:
        raise AudioError(
            f"{where} lasts {seconds:.3f} s ({samples} samples); {MIN_SECONDS} s is the least."
        )
    if stream is not None:
        collected += stream.resample_chunk(np.empty(0, np.float32), last=True).tobytes()
    return np.frombuffer(collected, np.float32)


def _heard(sound: Sound, where: str, limit_s: float) -> Iterator[Waveform]:
    """The blocks of a sound, each finite, as long as they are within the limit."""
    samples = 0
    for block in sound.blocks:
        bad = len(block) - int(np.isfinite(block).sum())
        if bad:
            raise AudioError(
                f"{where}: {bad} of {len(block)} samples are NaN or infinite, in the block that "
                f"begins at {samples / sound.rate:.3f} s."
            )
        samples += len(block)
        if samples > limit_s * sound.rate:
            raise _too_long(where, f"lasts {samples / sound.rate:.3f} s or more", limit_s)
        yield block


def _too_long(where: str, lasts: str, limit_s: float) -> PromptTooLongError:
    return PromptTooLongError(
        f"{where} {lasts}, and {limit_s:.3f} s of sound is the most that the context holds. "
        "Shorten it, or load with a larger context_length."
    )
