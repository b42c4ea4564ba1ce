"""Audio of a message item -> a mono float32 waveform at the model's rate, read in blocks."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import AudioError, PromptTooLongError, format_value
from qwen3_omni_neuron.prompt.media.container import BLOCK_NUMBERS, Section, open_sound
from qwen3_omni_neuron.prompt.media.fields import (
    Source,
    Warn,
    ignore,
    name_of,
    real_number,
    source_of,
)

Waveform = NDArray[np.float32]
Check = Callable[[float], object]
"""Function of the audio's length in seconds; may raise."""
MIN_RATE, MAX_RATE = 1_000, 1_000_000  # Hz; 1 Hz would become days of audio at 16 kHz
MOST_SAMPLE = 2.0**31  # unscaled 32-bit integers; the mel spectrum of 1e17 is infinite
MIN_SECONDS = 0.03


@dataclass(frozen=True)
class AudioSource:
    """Opened audio. rate: in Hz. seconds: length, None if unknown. blocks: mono [samples]."""

    rate: float
    seconds: float | None
    blocks: Iterator[Waveform]


def load_waveform(
    item: Mapping[str, Any],
    rate: int,
    where: str,
    limit_s: float = math.inf,
    check: Check = ignore,
    warn: Warn = ignore,
) -> Waveform:
    """Read an audio item of a message as mono float32 [samples] at `rate` Hz.

    item["audio"] is a path, the bytes of an audio file, an array [samples] or [samples, channels]
    (with item["sampling_rate"]; integers are scaled by their range), (array, rate), or an iterator
    of such arrays with equal channels. item["audio_start"], item["audio_end"]: part, in seconds.
    check: called with the known length, and again as it grows. warn: called for a partly used file.
    Raises PromptTooLongError for audio longer than limit_s, AudioError for unusable audio.
    Source: qwen-omni-utils (audio_start, audio_end).
    """
    collected = bytearray()  # joining a list of blocks would take the memory twice
    for block in waveform_blocks(item, rate, where, limit_s, check, warn):
        collected += block.tobytes()
    return np.frombuffer(collected, np.float32)


def waveform_blocks(
    item: Mapping[str, Any],
    rate: int,
    where: str,
    limit_s: float = math.inf,
    check: Check = ignore,
    warn: Warn = ignore,
) -> Iterator[Waveform]:
    """Read an audio item block by block: see `load_waveform`."""
    source = open_audio(item, where, warn)
    if source.seconds is not None:
        check(source.seconds)
        if source.seconds > limit_s:
            raise too_long(where, f"lasts {source.seconds:.3f} s", limit_s)
    checked_s = source.seconds or 0.0
    stream = _Resampled(source.rate, rate, where, limit_s)
    for block in source.blocks:
        yield stream.push(block)
        if stream.seconds > checked_s:
            checked_s = stream.seconds
            check(checked_s)
    yield stream.finish()


class ArrivingAudio:
    """Checks, mixes to mono and resamples one clip's pieces as they arrive.

    The samples equal those of `load_waveform` to the bit. sampling_rate: the pieces', in Hz.
    rate: the result's. where: name of the clip in errors. limit_s: longest clip.
    """

    def __init__(self, sampling_rate: Any, rate: int, where: str, limit_s: float = math.inf):
        self.sampling_rate = _checked_rate(sampling_rate, where)
        self._where = where
        self._mixer = _Mixer()
        self._stream = _Resampled(self.sampling_rate, rate, where, limit_s)

    @property
    def begun(self) -> bool:
        """True if any piece had a sample."""
        return self._mixer.channels is not None

    def push(self, piece: Any, sampling_rate: Any) -> Waveform:
        """Return the samples completed by a piece, [samples] or [samples, channels].

        Raises AudioError and PromptTooLongError, and then changes nothing.
        """
        now = _checked_rate(sampling_rate, self._where)
        if now != self.sampling_rate:
            raise AudioError(
                f"{self._where} has {now:g} Hz, but the clip's earlier pieces have "
                f"{self.sampling_rate:g} Hz. End the clip first, or resample the pieces."
            )
        blocks, channels = self._mixer.mix(piece, self._where)
        mono = np.concatenate([np.empty(0, np.float32), *blocks])
        samples = self._stream.push(mono)
        self._mixer.channels = channels
        return samples

    def finish(self) -> Waveform:
        """Return the last samples. Raises AudioError for a short clip, which may continue."""
        return self._stream.finish()


class _Resampled:
    def __init__(self, from_rate: float, to_rate: float, where: str, limit_s: float):
        self._rate, self._where, self._limit_s = from_rate, where, limit_s
        self._samples = 0
        self._stream = None if from_rate == to_rate else _resampler(from_rate, to_rate)

    @property
    def seconds(self) -> float:
        return self._samples / self._rate

    def push(self, block: Waveform) -> Waveform:
        bad = len(block) - int((np.abs(block) <= MOST_SAMPLE).sum())
        if bad:
            raise AudioError(
                f"{self._where}: {bad} of {len(block)} samples are NaN or larger than "
                f"{MOST_SAMPLE:g}, in the block that begins at {self._samples / self._rate:.3f} s. "
                "Give numbers from -1 to 1."
            )
        samples = self._samples + len(block)
        if samples > self._limit_s * self._rate:
            lasts = f"lasts {samples / self._rate:.3f} s or more"
            raise too_long(self._where, lasts, self._limit_s)
        self._samples = samples
        return block if self._stream is None else self._stream.resample_chunk(block)

    def finish(self) -> Waveform:
        check_length(self._samples, self._rate, self._where)
        rest = np.empty(0, np.float32)
        return rest if self._stream is None else self._stream.resample_chunk(rest, last=True)


def _resampler(from_rate: float, to_rate: float) -> Any:
    import soxr

    return soxr.ResampleStream(from_rate, to_rate, 1)


def check_length(samples: int, rate: float, where: str) -> None:
    """Raise AudioError for a clip that is too short."""
    seconds = samples / rate
    if seconds < MIN_SECONDS:
        message = f"{where} lasts {seconds:.3f} s ({samples} samples)"
        raise AudioError(f"{message}; the minimum is {MIN_SECONDS} s.")


def too_long(where: str, lasts: str, limit_s: float) -> PromptTooLongError:
    """Return the error for audio too long for the context."""
    return PromptTooLongError(
        f"{where} {lasts}, but the context fits at most {limit_s:.3f} s of audio. "
        "Shorten it, load with a larger context_length, or transcribe it: that has no limit."
    )


def longest_s(most_tokens: int | None, tokens_per_s: float) -> float:
    """Return the length of audio with `most_tokens` tokens."""
    return math.inf if most_tokens is None else most_tokens / tokens_per_s


def open_audio(item: Mapping[str, Any], where: str, warn: Warn = ignore) -> AudioSource:
    """Open a message item's audio between its start and end. Raises AudioError."""
    start_s, end_s = item.get("audio_start") or 0.0, item.get("audio_end") or math.inf
    source = _open(item.get("audio"), item.get("sampling_rate"), where, warn)
    return _between(source, start_s, end_s, where)


def _open(source: Any, rate: Any, where: str, warn: Warn) -> AudioSource:
    if isinstance(source, tuple) and len(source) == 2:
        source, rate = source
    if source is None:
        raise AudioError(f'{where} has no "audio": give a path, bytes, or an array.')
    if (file := source_of(source, where, AudioError)) is not None:
        return _open_file(file, where, warn)
    if isinstance(source, Iterator):
        return AudioSource(_checked_rate(rate, where), None, _arriving_blocks(source, where))
    samples = _channels_last(_numbers(source, where), where)
    rate = _checked_rate(rate, where)
    return AudioSource(rate, len(samples) / rate, _mono_blocks(samples))


def _open_file(source: Source, where: str, warn: Warn) -> AudioSource:
    sound = open_sound(source, where, warn)
    rate = _checked_rate(sound.rate, f"{where}: {name_of(source)}")
    return AudioSource(rate, sound.seconds, at_one_rate(sound.sections, rate, where, warn))


def at_one_rate(
    sections: Iterator[Section], rate: float, where: str, warn: Warn
) -> Iterator[Waveform]:
    """Yield a file's samples as mono blocks, all at `rate`."""
    first: tuple[int, int] | None = None
    now, stream, warned, count = rate, None, False, 0
    for hertz, samples in sections:
        kind = (hertz, samples.shape[1])
        first = first or kind
        if kind != first and not warned:
            warned = True
            warn(
                f"{where}: the file changes from {first[0]} Hz and {first[1]} channels to "
                f"{kind[0]} Hz and {kind[1]} channels at {count / rate:.2f} s. All of it is used, "
                f"at {first[0]} Hz."
            )
        if hertz != now:
            yield from _last_samples(stream)
            now = _checked_rate(hertz, where)
            stream = None if now == rate else _resampler(now, rate)
        at_once = max(1, int(BLOCK_NUMBERS * min(1.0, now / rate)))
        for start in range(0, len(samples), at_once):
            for block in _mono_blocks(samples[start : start + at_once]):
                made = block if stream is None else stream.resample_chunk(block)
                count += len(made)
                yield made
    yield from _last_samples(stream)


def _last_samples(stream: Any) -> Iterator[Waveform]:
    if stream is not None:
        yield stream.resample_chunk(np.empty(0, np.float32), last=True)


def _between(source: AudioSource, start_s: float, end_s: float, where: str) -> AudioSource:
    if (start_s, end_s) == (0.0, math.inf):
        return source
    seconds = source.seconds
    if seconds is not None:
        if start_s >= seconds:
            raise _begins_late(where, start_s, seconds)
        seconds = min(end_s, seconds) - start_s
    return AudioSource(source.rate, seconds, _blocks_between(source, start_s, end_s, where))


def _blocks_between(
    source: AudioSource, start_s: float, end_s: float, where: str
) -> Iterator[Waveform]:
    start, at = round(start_s * source.rate), 0
    end = math.inf if end_s == math.inf else round(end_s * source.rate)
    for block in source.blocks:
        first, last = max(0, start - at), min(len(block), end - at)
        at += len(block)
        if first < last:
            yield block[first : int(last)]
        if at >= end:
            return
    if at <= start:
        raise _begins_late(where, start_s, at / source.rate)


def _begins_late(where: str, start_s: float, seconds: float) -> AudioError:
    return AudioError(
        f"{where} has audio_start {start_s:g} s, but lasts {seconds:.3f} s. Give an earlier one."
    )


def _arriving_blocks(source: Iterator[Any], where: str) -> Iterator[Waveform]:
    mixer = _Mixer()
    for index, block in enumerate(source):
        blocks, mixer.channels = mixer.mix(block, f"{where}, block {index},")
        yield from blocks


class _Mixer:
    """Mixer of one clip's pieces. channels: None until the first sample."""

    channels: int | None = None

    def mix(self, piece: Any, place: str) -> tuple[Iterator[Waveform], int | None]:
        """Return a piece's mono blocks, and the clip's channels so far."""
        samples = _numbers(piece, place)
        if samples.ndim not in (1, 2):
            raise _bad_shape(place, samples)
        if not samples.size:
            return iter(()), self.channels
        # _channels_last would read 1 sample of 2 channels as 2 samples.
        now = samples.shape[1] if samples.ndim == 2 else 1
        if self.channels not in (None, now):
            raise AudioError(
                f"{place} has {now} channels, but the earlier blocks have {self.channels}. Give "
                "[samples] or [samples, channels], with equal channels in every block."
            )
        return _mono_blocks(samples), now


def _numbers(source: Any, where: str) -> NDArray[Any]:
    try:
        samples = np.asarray(source)
    except Exception as error:
        raise AudioError(f"{where} is neither a path, bytes nor an array: {error}") from error
    if not np.issubdtype(samples.dtype, np.integer) and not np.issubdtype(
        samples.dtype, np.floating
    ):
        raise AudioError(f"{where} is an array of {samples.dtype}; it must be of numbers.")
    return samples


def _channels_last(samples: NDArray[Any], where: str) -> NDArray[Any]:
    if samples.ndim not in (1, 2):
        raise _bad_shape(where, samples)
    if not samples.size:
        return samples.reshape(-1)
    # Fewer rows than columns: [channels, samples], the order of torchaudio.
    return samples.T if samples.ndim == 2 and samples.shape[0] < samples.shape[1] else samples


def _bad_shape(where: str, samples: NDArray[Any]) -> AudioError:
    return AudioError(
        f"{where} has shape {list(samples.shape)}; give [samples] or [samples, channels]."
    )


def _mono_blocks(samples: NDArray[Any]) -> Iterator[Waveform]:
    at_once = max(1, BLOCK_NUMBERS // math.prod(samples.shape[1:]))
    for start in range(0, len(samples), at_once):
        # numpy sums non-contiguous channels in another order.
        block = np.ascontiguousarray(_scaled(samples[start : start + at_once]))
        yield block if block.ndim == 1 else block.mean(axis=1)


def _scaled(samples: NDArray[Any]) -> Waveform:
    """Return samples as float32; an integer type's range becomes -1 to 1."""
    if np.issubdtype(samples.dtype, np.integer):
        info = np.iinfo(samples.dtype)
        middle = (int(info.max) + int(info.min) + 1) // 2  # 128 where unsigned, 0 where signed
        samples = (samples - float(middle)) / (float(info.max) - middle + 1)
    with np.errstate(over="ignore"):  # inf is refused later
        return samples.astype(np.float32)


def _checked_rate(rate: Any, where: str) -> float:
    hertz = real_number(rate)
    if hertz is None or hertz <= 0:
        raise AudioError(
            f"{where} is audio without its sampling_rate (got {format_value(rate)}). "
            'Add "sampling_rate": 16000, or whatever its rate is, in Hz.'
        )
    if not MIN_RATE <= hertz <= MAX_RATE:
        raise AudioError(
            f"{where} has a sampling_rate of {hertz:g} Hz; {MIN_RATE} to {MAX_RATE} Hz are "
            "supported. Give the rate in Hz, not in kHz."
        )
    return hertz
