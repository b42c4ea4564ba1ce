"""Sound in every form a caller may have it -> blocks of mono float32, at the rate it has."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from qwen3_omni_neuron.conversation.media.file import Source, name_of, open_media
from qwen3_omni_neuron.errors import AudioError, PromptTooLongError

Waveform = NDArray[np.float32]
BLOCK_NUMBERS = 1 << 20  # taken at once, of all channels together: 11 s of 48 kHz stereo, 4 MiB
MIN_RATE, MAX_RATE = 1_000, 1_000_000  # Hz; a header that says 1 Hz would become days of 16 kHz
_UNKNOWN_LENGTH = 2**63 - 1  # libsndfile's number of samples where the header has none


@dataclass(frozen=True)
class Sound:
    """A sound that is about to be read.

    rate: Hz. seconds: how long it is, None while it is still arriving. blocks: mono
    [samples], at most BLOCK_NUMBERS each; can be gone through once, and raises AudioError.
    """

    rate: float
    seconds: float | None
    blocks: Iterator[Waveform]


def open_sound(item: Mapping[str, Any], where: str) -> Sound:
    """What an audio item of a message holds; its forms are those of audio.load_waveform.

    Raises AudioError, beginning with `where`, when that is none of them.
    """
    source, rate = item.get("audio"), item.get("sampling_rate")
    if isinstance(source, tuple) and len(source) == 2:
        source, rate = source
    if source is None:
        raise AudioError(f'{where} has no "audio": give a path, bytes, or an array.')
    if isinstance(source, str | Path | bytes | bytearray):
        return _open_file(source, where)
    if isinstance(source, Iterator):
        return Sound(_checked_rate(rate, where), None, _arriving(source, where))
    samples = _channels_last(_numbers(source, where), where)
    rate = _checked_rate(rate, where)
    return Sound(rate, len(samples) / rate, _mono_blocks(samples))


def _open_file(source: Source, where: str) -> Sound:
    try:
        with open_media(source, where, AudioError) as file:
            info = soundfile.info(file)
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise _unreadable(where, source, error) from error
    if info.frames == _UNKNOWN_LENGTH:  # and libsndfile fails at such a file's end
        raise _unreadable(where, source, "its header has no length, as of a FLAC made in a pipe")
    rate = _checked_rate(info.samplerate, where)
    return Sound(rate, info.frames / rate, _file_blocks(source, where))


def _file_blocks(source: Source, where: str) -> Iterator[Waveform]:
    try:
        with open_media(source, where, AudioError) as file, soundfile.SoundFile(file) as sound:
            # Not sound.blocks(): it goes by the header's length, and where the file ends before it
            # repeats the last block's samples.
            at_once = max(1, BLOCK_NUMBERS // sound.channels)
            while len(block := sound.read(at_once, dtype="float32", always_2d=True)):
                yield from _mono_blocks(block)
    except (soundfile.SoundFileError, OSError) as error:
        raise _unreadable(where, source, error) from error


def _unreadable(where: str, source: Source, error: object) -> AudioError:
    return AudioError(
        f"{where}: {name_of(source)} can't be read as sound ({error}). WAV, FLAC, OGG and MP3 can."
    )


def _arriving(source: Iterator[Any], where: str) -> Iterator[Waveform]:
    """The caller's blocks, as they come."""
    channels = None
    for index, block in enumerate(source):
        place = f"{where}, block {index},"
        samples = _numbers(block, place)
        if samples.ndim not in (1, 2):
            raise _bad_shape(place, samples)
        if not samples.size:
            continue
        # Not _channels_last: a block of 1 sample and 2 channels would be taken for 2 samples.
        now = samples.shape[1] if samples.ndim == 2 else 1
        if channels not in (None, now):
            raise AudioError(
                f"{place} has {now} channels, and those before it {channels}. Give [samples] or "
                "[samples, channels], with as many channels in every block."
            )
        channels = now
        yield from _mono_blocks(samples)


def _numbers(source: Any, where: str) -> NDArray[Any]:
    """An array of integers or floating point numbers."""
    try:
        samples = np.asarray(source)
    except (ValueError, TypeError, RuntimeError) as error:
        raise AudioError(f"{where} is neither a path, bytes nor an array: {error}") from error
    if not np.issubdtype(samples.dtype, np.integer) and not np.issubdtype(
        samples.dtype, np.floating
    ):
        raise AudioError(f"{where} is an array of {samples.dtype}; numbers are needed.")
    return samples


def _channels_last(samples: NDArray[Any], where: str) -> NDArray[Any]:
    if samples.ndim not in (1, 2):
        raise _bad_shape(where, samples)
    if not samples.size:
        return samples.reshape(-1)
    # More channels than samples: [channels, samples], as torchaudio has it.
    return samples.T if samples.ndim == 2 and samples.shape[0] < samples.shape[1] else samples


def _bad_shape(where: str, samples: NDArray[Any]) -> AudioError:
    return AudioError(
        f"{where} has shape {list(samples.shape)}; give [samples] or [samples, channels]."
    )


def _mono_blocks(samples: NDArray[Any]) -> Iterator[Waveform]:
    """[samples] or [samples, channels] of any kind of number, averaged over the channels."""
    at_once = max(1, BLOCK_NUMBERS // math.prod(samples.shape[1:]))
    for start in range(0, len(samples), at_once):
        block = _scaled(samples[start : start + at_once])
        yield block if block.ndim == 1 else block.mean(axis=1)


def _scaled(samples: NDArray[Any]) -> Waveform:
    """float32; integers are divided by their range, so that -1 to 1 is all of it."""
    if np.issubdtype(samples.dtype, np.integer):
        info = np.iinfo(samples.dtype)
        middle = (int(info.max) + int(info.min) + 1) // 2  # 128 where unsigned, 0 where signed
        samples = (samples - float(middle)) / (float(info.max) - middle + 1)
    with np.errstate(over="ignore"):  # what float32 can't hold becomes infinite, which is refused
        return samples.astype(np.float32)


def _checked_rate(rate: Any, where: str) -> float:
    if not isinstance(rate, Real) or not 0 < float(rate) < math.inf:
        raise AudioError(
            f"{where} is sound without its sampling_rate (got {rate!r}). "
            'Add "sampling_rate": 16000, or whatever its rate is, in Hz.'
        )
    if not MIN_RATE <= float(rate) <= MAX_RATE:
        raise AudioError(
            f"{where} has a sampling_rate of {float(rate):g} Hz; {MIN_RATE} to {MAX_RATE} Hz are "
            "understood. Give the rate in Hz, not in kHz."
        )
    return float(rate)


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
