"""Work of a decoder: report an item's sizes, decode it, write the result."""

import contextlib
import errno
import importlib
import math
import mmap
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qwen3_omni_neuron.errors import InputError, VideoError
from qwen3_omni_neuron.helpers import wire
from qwen3_omni_neuron.helpers.fork_server import Run, serve
from qwen3_omni_neuron.helpers.job import ERRORS, Job, Measured
from qwen3_omni_neuron.prompt.media.audio import Waveform, load_waveform
from qwen3_omni_neuron.prompt.media.fields import Warn
from qwen3_omni_neuron.prompt.media.image import MAX_ASPECT, load_image
from qwen3_omni_neuron.prompt.media.pixels import resize
from qwen3_omni_neuron.prompt.media.sizes import SizeLimits, VisualSize
from qwen3_omni_neuron.prompt.media.video import VideoHeader, load_video
from qwen3_omni_neuron.prompt.media.visual_size import read_image, visual_size

NICENESS = 5
Ask = Callable[[Measured], object]
"""Function that reports the sizes of the item, and returns when it may be decoded."""
THREADS = 2  # threads of a video's decoder: each keeps its own frames in memory


def main(control: int, setup: int, parent: int) -> None:
    """Serve until the pool disconnects; see helpers.fork_server.serve."""
    serve(control, setup, parent, NICENESS, prepare)


def prepare(setup: int) -> Run:
    """Import the codecs, so that no child has to; return what a child does."""
    Image.init()
    for name in ("soundfile", "soxr", "av"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    Image.MAX_IMAGE_PIXELS = None  # each job has its own limit
    return run


@dataclass(frozen=True, eq=False)
class Made:
    """Decoded data of an item.

    pixels: uint8 [frames, height, width, 3]. samples: float32. fps: frame rate of a video. fitted:
    the frames have the size that the checkpoint's processor gives them. warnings: see
    prompt.media.fields.Warn.
    """

    pixels: NDArray[np.uint8] | None = None
    samples: Waveform | None = None
    fps: float = 0.0
    fitted: bool = True
    warnings: tuple[str, ...] = ()


def run(line: wire.Line, job: int, result: int) -> None:
    """Decode one item, or read its size alone. See helpers.media.DecodingPool.decode.

    job, result: descriptors of the files with the item and for the decoded data.
    Raises InputError and MemoryError.
    """
    with open(job, "rb") as file:
        file.seek(0)
        item = pickle.load(file)
        item = replace(item, content=file.read())

    def ask(measured: Measured) -> None:
        line.send(wire.MEASURED, measured.seconds, measured.pixels, measured.size)
        line.receive(len(wire.GO))

    try:
        if item.size_alone:
            size = measure(item)
            line.send(wire.SHAPE, size.height, size.width, size.frames or 0, size.sound_tokens)
            return
        made = decode(item, ask)
    except InputError as error:
        if _lacks_memory(error):
            raise MemoryError from None
        raise
    sides = (0, 0, 0) if made.pixels is None else made.pixels.shape[:3]
    samples = 0 if made.samples is None else len(made.samples)
    warnings = "\n".join(warning.replace("\n", " ") for warning in made.warnings)
    line.send(wire.HOLDS, *sides, samples, made.fps, made.fitted, text=warnings)
    line.receive(len(wire.GO))
    parts = [part for part in (made.pixels, made.samples) if part is not None]
    with mmap.mmap(result, sum(part.nbytes for part in parts)) as memory:
        for part in parts:
            memory.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)


def decode(job: Job, ask: Ask) -> Made:
    """Decode an item. Raises InputError if it can't be decoded or is too large."""
    if job.pictures:
        return _pictures(job, ask)
    return {"audio": _audio, "image": _image, "video": _video}[job.kind](job, ask)


def read_audio(job: Job, item: Mapping[str, Any], ask: Ask, warn: Warn) -> Waveform:
    """Read a job's audio, given as a message's item, at the checkpoint's sample rate."""
    rate = job.media.audio_rate
    asked = False

    def check(seconds: float) -> None:
        nonlocal asked
        if not asked:  # where a file turns out longer, its result is admitted once more
            asked = True
            ask(Measured(seconds, 0, 4 * round(seconds * rate)))
        _check_seconds(job, seconds)

    holds_s = job.media.longest_audio_s(job.most_tokens)
    return load_waveform(item, rate, job.where, holds_s, check, warn)


def measured_picture(job: Job, height: int, width: int) -> Measured:
    """Return the sizes of a picture of so many pixels. Raises the API's errors."""
    size, _ = _kept_size(job, _visual(job, height, width))
    return Measured(0.0, height * width, 3 * math.prod(size))


def measure(job: Job) -> VisualSize:
    """Read the size of an image or video, without decoding it. Raises the API's errors."""
    heard = job.media if job.use_audio_in_video else None
    size = visual_size(job.kind, _item(job), job.where, heard)
    job.media.sizes.exact_grid(size)
    return size


def _audio(job: Job, ask: Ask) -> Made:
    warnings: list[str] = []
    samples = read_audio(job, {**job.options, "audio": job.content}, ask, warnings.append)
    return Made(samples=samples, warnings=tuple(warnings))


def _image(job: Job, ask: Ask) -> Made:
    def check(height: int, width: int) -> None:
        ask(measured_picture(job, height, width))
        _check_pixels(job, height, width)

    warnings: list[str] = []
    sizes, asked = job.media.sizes, _asked(job)
    picture, grid = read_image(_item(job), job.where, sizes, asked, check, warnings.append)
    _check_pixels(job, picture.height, picture.width)
    size = sizes.pixels(grid)
    fitted = _passes(size)
    pixels = resize(picture, size) if fitted else np.asarray(picture)
    return Made(pixels[None], fitted=fitted, warnings=tuple(warnings))


def _video(job: Job, ask: Ask) -> Made:
    audio_rate = job.media.audio_rate if job.use_audio_in_video else None
    holds_s = job.media.longest_audio_s(job.most_tokens)
    frames, fitted, warnings = 0, True, list[str]()
    sizes, shown = job.media.sizes, VisualSize(job.where, 0, 0)

    def check(header: VideoHeader) -> None:
        nonlocal frames
        frames = header.frames
        size, _ = _kept_size(job, _visual(job, header.height, header.width, frames))
        audio = round(header.audio_s * job.media.audio_rate)
        kept = 3 * frames * math.prod(size) + 4 * audio
        seconds = max(header.seconds, header.audio_s)
        ask(Measured(seconds, header.height * header.width, kept))
        _check_seconds(job, seconds)
        _check_pixels(job, header.height, header.width)

    def fit(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        nonlocal fitted, shown
        height, width, _ = frame.shape
        _check_pixels(job, height, width)  # the size may differ from that in the header
        shown = _visual(job, height, width, frames)
        size, fitted = _kept_size(job, shown)
        return resize(Image.fromarray(frame), size)

    video = load_video(
        _item(job),
        job.where,
        audio_rate=audio_rate,
        limit_s=holds_s if job.most_s is None else min(holds_s, job.most_s),
        check=check,
        fit=fit,
        threads=THREADS,
        warn=warnings.append,
    )
    whole = replace(shown, frames=job.frames or frames)
    sizes.warn_of_shrinking(whole, sizes.grid(shown), warnings.append)
    return Made(video.frames, video.audio, video.fps, fitted, tuple(warnings))


def _pictures(job: Job, ask: Ask) -> Made:
    """Decode a video that is given as pictures: those that are shown, each resized by itself."""
    warnings: list[str] = []
    item, sizes = _item(job), job.media.sizes
    first = visual_size(job.kind, item, job.where, None)
    height, width, total = first.height, first.width, job.pictures
    size = replace(first, asked=_asked(job))
    grid = sizes.grid(size)
    sizes.warn_of_shrinking(size, grid, warnings.append)
    frames = sizes.frames_of(grid, total)
    shown, fitted = _kept_size(job, _visual(job, height, width, frames))
    ask(Measured(total / item["fps"], height * width, 3 * frames * math.prod(shown)))
    _check_seconds(job, total / item["fps"])
    _check_pixels(job, height, width)
    pixels = np.empty((frames, *shown, 3), np.uint8)
    for index in range(frames):
        at = index * total // frames
        place = f"{job.where}.video[{at}]"
        picture = load_image({"image": item["video"][at]}, place)
        if (picture.height, picture.width) != (height, width):
            raise VideoError(
                f"{job.where} has frames of {width} x {height} and, at {at}, of {picture.width} x "
                f"{picture.height} pixels. Make them one size."
            )
        pixels[index] = resize(picture, shown)
    return Made(pixels, None, item["fps"] * frames / total, fitted, tuple(warnings))


def _item(job: Job) -> dict[str, Any]:
    """Return the job's file or pictures as an item of a message."""
    return {**job.options, job.kind: job.files if job.pictures else job.content}


def _visual(job: Job, height: int, width: int, frames: int | None = None) -> VisualSize:
    """Return a size for an image or a video of which no frame is left out any more."""
    asked = replace(_asked(job), least_frames=frames or 1)
    return VisualSize(job.where, height, width, frames, asked)


def _kept_size(job: Job, size: VisualSize) -> tuple[tuple[int, int], bool]:
    """Return the height and width to keep of a picture, and whether they are fitted.

    They are fitted unless the API would refuse the fitted size as too long and narrow: rounding
    sides to whole tokens can make an allowed picture so. Raises the API's errors.
    """
    made = job.media.sizes.pixels(job.media.sizes.grid(size))
    fits = _passes(made)
    return (made if fits else (size.height, size.width)), fits


def _passes(size: tuple[int, int]) -> bool:
    """Return whether the API takes an image of this size."""
    return max(size) <= MAX_ASPECT * min(size)


def _asked(job: Job) -> SizeLimits:
    return SizeLimits.of(job.options, job.vision_tokens)


def _check_seconds(job: Job, seconds: float) -> None:
    if job.most_s is not None and seconds > job.most_s:
        raise ERRORS[job.kind](
            f"{job.where} lasts {seconds:.1f} s, and {job.most_s:g} s is the most. Send a part of "
            "it."
        )


def _check_pixels(job: Job, height: int, width: int) -> None:
    if job.most_pixels is not None and height * width > job.most_pixels:
        raise ERRORS[job.kind](
            f"{job.where} has {height * width} pixels, and {job.most_pixels} is the most. Shrink "
            "it."
        )


def _lacks_memory(error: BaseException | None) -> bool:
    """Return whether a lack of memory caused an error."""
    while error is not None:
        no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if no_memory or isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
