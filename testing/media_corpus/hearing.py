"""Compare what was heard of a file with the sounds that were written into it."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import soundfile

from testing.media_corpus.sounds import SECONDS, Mono, Sound, gains, signal

_WINDOW_S = 0.15
_FIRST_S = 0.05  # encoders begin and end a sound in their own ways
_STARTS = tuple(_FIRST_S + _WINDOW_S * k for k in range(7))
_LOUDER = 0.1  # part by which a codec may change the level


@dataclass(frozen=True)
class Recognised:
    """Written sounds that were recognised in what was read.

    seconds: of the written sounds, from the first one's beginning, in their order. wrong: what was
    heard in place of the rest; None if there was no more. extra_s: length of what was heard beyond
    the written sounds.
    """

    seconds: float
    wrong: str | None = None
    extra_s: float = 0.0


def recognise(
    heard: Mono,
    rate: int,
    parts: Sequence[Sound],
    *,
    least: float,
    padding_s: float = 0.2,
    levels: bool = True,
    unsure_s: float = 0.0,
) -> Recognised:
    """Find the written sounds in what was heard, window by window.

    rate: of `heard` in Hz, at which the sounds are made again. least: correlation of each window.
    padding_s: most silence before and after each sound. levels: how loud it is counts, too.
    unsure_s: length of the end of `heard` that may be anything: what is made of half a packet.
    """
    size, slack = round(_WINDOW_S * rate), round(0.01 * rate)
    sure = len(heard) - round(unsure_s * rate)
    place, seconds = 0, 0.0
    for index, sound in enumerate(parts):
        written = signal(sound.part, rate) * gains(sound.channels).mean()
        for start in _STARTS:
            first = round(start * rate)
            window = written[first : first + size]
            free = round((padding_s + 2 * _FIRST_S) * rate) if start == _FIRST_S else slack
            begin = max(0, place - slack)
            end = begin + size + free + slack
            found, likeness, gain = _best(heard[begin : min(end, sure)], window)
            at = f"sound {index + 1} at {start:.2f} s"
            if likeness < least:
                wrong = None if end > sure else f"{at}: correlation {likeness:.4f}"
                return Recognised(seconds, wrong)
            if levels and abs(gain - 1) > _LOUDER:
                return Recognised(seconds, f"{at}: {gain:.2f} times as loud")
            place = begin + found + size
            seconds = index * SECONDS + start + _WINDOW_S
    end = place + round((SECONDS - _STARTS[-1] - _WINDOW_S) * rate)
    return Recognised(len(parts) * SECONDS, extra_s=(len(heard) - end) / rate)


def _best(heard: Mono, window: Mono) -> tuple[int, float, float]:
    """Return where a window is in what was heard, its correlation there, and how loud it is."""
    count = len(heard) - len(window) + 1
    if count < 1:
        return 0, 0.0, 0.0
    size = len(heard) + len(window)
    product = np.fft.rfft(heard, size) * np.fft.rfft(window, size).conj()
    products = np.fft.irfft(product, size)[:count]
    sums = np.concatenate([[0.0], np.cumsum(heard.astype(float) ** 2)])
    energy = np.maximum(sums[len(window) :] - sums[:count], 1e-9)
    norm = float((window.astype(float) ** 2).sum())
    likeness = products / np.sqrt(energy * norm)
    place = int(likeness.argmax())
    return place, float(likeness[place]), float(products[place] / norm)


def by_pyav(content: bytes) -> list[tuple[int, Mono]]:
    """Return what PyAV decodes of the first sound, packet by packet: rates in Hz and mono samples.

    What can't be decoded is left out; the list is empty where nothing can.
    """
    import av

    pieces: list[tuple[int, Mono]] = []
    kind, resampler = None, av.AudioResampler(format="flt")
    try:
        with av.open(io.BytesIO(content), metadata_errors="ignore") as container:
            if not container.streams.audio:
                return []
            for packet in container.demux(container.streams.audio[0]):
                try:
                    frames = packet.decode()
                except (av.FFmpegError, ValueError):
                    continue
                for frame in frames:
                    # Packed: PyAV 18 reads beyond the planes of 8 channels.
                    now = frame.format.name, frame.layout.name, frame.sample_rate
                    if now != kind:
                        kind, resampler = now, av.AudioResampler(format="flt")
                    for part in resampler.resample(frame):
                        samples = part.to_ndarray().reshape(-1, frame.layout.nb_channels)
                        pieces.append((frame.sample_rate, samples.mean(axis=1)))
    except (av.FFmpegError, ValueError, ArithmeticError, AttributeError, IndexError):
        pass  # what was decoded before it counts
    return pieces


def by_libsndfile(content: bytes, wanted: bool) -> Iterator[Mono]:
    """Yield what libsndfile decodes of a file if it is wanted: mono samples."""
    if wanted:
        try:
            with soundfile.SoundFile(io.BytesIO(content)) as file:
                yield file.read(file.frames, dtype="float32", always_2d=True).mean(axis=1)
        except soundfile.SoundFileError:
            return
