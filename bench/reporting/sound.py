"""The spectrogram of a reply, with the boundaries of its chunks."""

from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from matplotlib import mlab
from numpy.typing import NDArray

from bench.reporting.rows import Request
from bench.reporting.sources import Source
from bench.reporting.style import PAPER, Picture, new_figure, png_of
from bench.reporting.timeline import draw_chunks
from bench.reporting.words import counted, seconds

WINDOW, HOP = 1024, 256  # samples: 43 ms and 11 ms at 24 kHz
FLOOR_DB = -80.0


class NoSoundError(Exception):
    """There is no sound to be drawn, and why."""


def spectrogram(source: Source, request: Request) -> Picture:
    """Draw a reply's sound. Raises NoSoundError if it is absent, or is another reply's."""
    samples, rate = _sound_of(source, request)
    power, hertz = power_of(samples, rate)
    duration_s = len(samples) / rate
    title = (
        f"Spectrogram of {seconds(duration_s)} of speech in {counted(len(request.chunks), 'chunk')}"
    )
    figure = new_figure(4.2, title, source.what_ran, source.is_replay)
    lane, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 14))
    look: Any = {"origin": "lower", "aspect": "auto", "cmap": "cividis", "vmin": FLOOR_DB}
    image = axes.imshow(10 * np.log10(power), extent=(0, duration_s, 0, rate / 2000), **look)
    spans = [(c.first_sample / rate, (c.first_sample + c.samples) / rate) for c in request.chunks]
    for _, until_s in spans[:-1]:
        axes.axvline(until_s, color=PAPER, linewidth=0.9, linestyle="--")
    axes.set_xlabel("s of speech; dashed: where a chunk ends and the next begins")
    axes.set_ylabel("kHz")
    figure.colorbar(image, ax=[lane, axes], pad=0.01, fraction=0.03, label="dB below the loudest")
    draw_chunks(lane, 0, request.chunks, spans, duration_s)
    lane.set_ylim(-0.3, 0.3)
    lane.set_yticks([0], ["chunks"])
    lane.tick_params(length=0, labelbottom=False)
    lane.spines[:].set_visible(False)

    name = f"request {request.request} ({request.conversation})"
    bounds = ", ".join(f"{until_s:.2f} s" for _, until_s in spans[:-1])
    below = np.cumsum(power.sum(axis=1)) / power.sum()
    return Picture(
        f"spectrogram-{source.letter.lower()}",
        f"Spectrogram with chunk boundaries ({source.title})",
        f"Spectrogram of {name}: {seconds(duration_s)} of speech, 0 to {rate / 2000:g} kHz. "
        f"{f'Chunks meet at {bounds}.' if bounds else 'It is one chunk.'} Half of its power lies "
        f"below {hertz[np.searchsorted(below, 0.5)] / 1000:.1f} kHz.",
        f"R{name[1:]}, {request.audio_file}. A click at a boundary would be a bright line from top "
        "to bottom.",
        png_of(figure),
    )


def power_of(samples: NDArray[np.float32], rate: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the power, [1 + WINDOW / 2, windows], as a share of the loudest, and its frequencies.

    Silence is added at both ends, so that the windows' centres cover the sound. The power is at
    least that of FLOOR_DB.
    """
    padded: Any = np.pad(samples.astype(np.float64), WINDOW // 2)
    found: Any = mlab.specgram(padded, NFFT=WINDOW, Fs=rate, noverlap=WINDOW - HOP)
    loudest = max(found[0].max(), np.finfo(np.float64).tiny)
    return np.maximum(found[0] / loudest, 10 ** (FLOOR_DB / 10)), found[1]


def _sound_of(source: Source, request: Request) -> tuple[NDArray[np.float32], int]:
    if request.audio_file is None:
        raise NoSoundError("no sound was kept. Run the benchmark with --save-audio.")
    folder = Path(str(source.results.settings.get("save_audio") or "."))
    # At the path that the benchmark noted, or moved along with the result file.
    places = (folder, source.file.parent / folder, source.file.parent / folder.name)
    tried = [place / request.audio_file for place in places]
    file = next(filter(Path.is_file, tried), None)
    if file is None:
        raise NoSoundError(f"{tried[0]} is not there, nor beside {source.file.name}.")
    try:
        samples, rate = soundfile.read(file, dtype="float32")
    except (OSError, soundfile.SoundFileError) as error:
        raise NoSoundError(f"{file} can't be read: {error}") from error
    wanted = sum(chunk.samples for chunk in request.chunks)
    if samples.ndim != 1 or len(samples) != wanted or not wanted:
        found = f"{file} has {len(samples)} samples, and the request's chunks {wanted}"
        raise NoSoundError(f"{found}: it is of another run.")
    return samples, rate
