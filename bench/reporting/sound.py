"""The spectrogram of a reply, with the boundaries of its chunks."""

from pathlib import Path

import numpy as np
import soundfile
from matplotlib.axes import Axes
from numpy.typing import NDArray

from bench.reporting.rows import Request
from bench.reporting.sources import Source
from bench.reporting.style import INK, PAPER, Picture, headline, new_figure, png_of, styled
from bench.reporting.timeline import CHUNK_SHADES
from bench.reporting.words import seconds

WINDOW, HOP = 1024, 256  # samples: 43 ms and 11 ms at 24 kHz
FLOOR_DB = -80.0


class NoSoundError(Exception):
    """There is no sound to be drawn, and why."""


def spectrogram(source: Source, request: Request) -> Picture:
    """Raises NoSoundError where the WAV file is not there, or is not of this request."""
    samples, rate = _sound_of(source, request)
    level_db = levels_db(samples)
    duration_s = len(samples) / rate
    with styled():
        figure = new_figure(4.2)
        headline(
            figure,
            f"Spectrogram of {seconds(duration_s)} of speech in {len(request.chunks)} chunks",
            source.what_ran,
            source.is_replay,
        )
        lane, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 14))
        image = axes.imshow(
            level_db,
            origin="lower",
            aspect="auto",
            extent=(0, duration_s, 0, rate / 2000),
            cmap="cividis",
            vmin=FLOOR_DB,
            vmax=0,
        )
        for chunk in request.chunks[1:]:
            axes.axvline(chunk.first_sample / rate, color=PAPER, linewidth=0.9, linestyle="--")
        _draw_chunks(lane, request, rate, duration_s)
        axes.set_xlim(0, duration_s)
        axes.set_xlabel("s of speech; dashed: where a chunk ends and the next begins")
        axes.set_ylabel("kHz")
        bar = figure.colorbar(image, ax=[lane, axes], pad=0.01, fraction=0.03)
        bar.set_label("dB below the loudest")
        return Picture(
            f"spectrogram-{source.letter.lower()}",
            f"Spectrogram with chunk boundaries ({source.title})",
            _alt(request, level_db, rate, duration_s),
            f"Request {request.number} ({request.conversation}), {request.audio_file}. A click "
            "at a boundary would be a bright line from top to bottom.",
            png_of(figure, colours=256),
        )


def levels_db(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """float32 [samples] -> [1 + WINDOW / 2, windows], in dB below the loudest, FLOOR_DB or more.

    The sound is as long as the windows' middles cover, silence added at both ends.
    """
    padded = np.pad(samples.astype(np.float64), WINDOW // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW), axis=1)).T ** 2
    loudest = max(power.max(), np.finfo(np.float64).tiny)
    return 10 * np.log10(np.maximum(power / loudest, 10 ** (FLOOR_DB / 10)))


def _sound_of(source: Source, request: Request) -> tuple[NDArray[np.float32], int]:
    if request.audio_file is None:
        raise NoSoundError("no sound was kept. Run the benchmark with --save-audio.")
    folder = Path(str(source.results.settings.get("save_audio") or "."))
    # As the benchmark named it, or moved along with the result file.
    tried = [folder, source.file.parent / folder, source.file.parent / folder.name]
    file = next((f for place in tried if (f := place / request.audio_file).is_file()), None)
    if file is None:
        raise NoSoundError(
            f"{folder / request.audio_file} is not there, nor beside {source.file.name}."
        )
    try:
        samples, rate = soundfile.read(file, dtype="float32")
    except (OSError, soundfile.SoundFileError) as error:
        raise NoSoundError(f"{file} can't be read: {error}") from error
    wanted = sum(chunk.samples for chunk in request.chunks)
    if samples.ndim != 1 or len(samples) != wanted or not wanted:
        raise NoSoundError(
            f"{file} has {len(samples)} samples, and the request's chunks {wanted}: it is of "
            "another run."
        )
    return samples, rate


def _draw_chunks(lane: Axes, request: Request, rate: int, duration_s: float) -> None:
    """A strip of blocks, one a chunk, with its frames in it where they fit."""
    for number, chunk in enumerate(request.chunks):
        start_s, length_s = chunk.first_sample / rate, chunk.samples / rate
        lane.broken_barh([(start_s, length_s)], (0, 1), color=CHUNK_SHADES[number % 2], linewidth=0)
        if length_s > 0.02 * duration_s:
            words = f"{chunk.frames} frames" if length_s > 0.1 * duration_s else str(chunk.frames)
            lane.text(
                start_s + length_s / 2, 0.45, words,
                ha="center", va="center", fontsize=8, color=PAPER,
            )  # fmt: skip
    lane.set_ylim(0, 1)
    lane.set_yticks([0.5], ["chunks"])
    lane.tick_params(axis="both", length=0, labelbottom=False, colors=INK)
    for side in lane.spines.values():
        side.set_visible(False)


def _alt(request: Request, level_db: NDArray[np.float64], rate: int, duration_s: float) -> str:
    bounds = ", ".join(f"{chunk.first_sample / rate:.2f} s" for chunk in request.chunks[1:])
    where = f"Chunks meet at {bounds}." if bounds else "It is one chunk."
    power = 10 ** (level_db / 10)
    hertz = np.linspace(0, rate / 2, len(power))
    below = np.cumsum(power.sum(axis=1)) / power.sum()
    half = hertz[np.searchsorted(below, 0.5)]
    return (
        f"Spectrogram of request {request.number} ({request.conversation}): {seconds(duration_s)} "
        f"of speech, 0 to {rate / 2000:g} kHz. {where} Half of its power lies below "
        f"{half / 1000:.1f} kHz."
    )
