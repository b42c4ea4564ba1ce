"""Work of a decoder: report an item's sizes, decode it, write the result."""

import contextlib
import errno
import importlib
import math
import mmap
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qwen3_omni_neuron.errors import InputError, VideoError
from qwen3_omni_neuron.helpers import wire
from qwen3_omni_neuron.helpers.fork_server import Run, serve
from qwen3_omni_neuron.helpers.job import Job, Measured
from qwen3_omni_neuron.prompt.media.audio import Waveform, load_waveform, longest_s
from qwen3_omni_neuron.prompt.media.fields import Warn
from qwen3_omni_neuron.prompt.media.image import MAX_ASPECT, load_image
from qwen3_omni_neuron.prompt.media.pixels import SizeLimits, VisualSize, resize
from qwen3_omni_neuron.prompt.media.video import VideoHeader, load_video

NICENESS = 5
Ask = Callable[[Measured], object]
"""Callback that reports the item's sizes, and returns when it may be decoded."""


def main(control: int, setup: int, parent: int) -> None:
    """Serve until the pool disconnects; see helpers.fork_server.serve."""
    serve(control, setup, parent, NICENESS, prepare)


def prepare(setup: int) -> Run:
    """Import the codecs once for all children; return a child's function."""
    Image.init()
    for name in ("soundfile", "soxr", "av"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    Image.MAX_IMAGE_PIXELS = None  # each job has its own limit
    return run


@dataclass(frozen=True, eq=False)
class DecodedData:
    """Decoded data of an item.

    pixels: uint8 [frames, height, width, 3]. samples: float32. fps: frame rate of a video. fitted:
    the frames have the size from the checkpoint's processor. warnings: see
    prompt.media.fields.Warn.
    """

    pixels: NDArray[np.uint8] | None = None
    samples: Waveform | None = None
    fps: float = 0.0
    fitted: bool = True
    warnings: tuple[str, ...] = ()


def run(channel: wire.Channel, result: int) -> None:
    """Decode one item. See helpers.media.DecodingPool.decode.

    result: descriptor of the file for the decoded data. Raises InputError and MemoryError.
    """
    head, content = channel.job()
    item: Job = pickle.loads(head)
    if isinstance(item.content, bytes):
        item = replace(item, content=content)

    def ask(measured: Measured) -> None:
        channel.send(wire.MEASURED, measured.seconds, measured.pixels, measured.size)
        channel.receive(len(wire.GO))

    try:
        made = decode(item, ask)
    except InputError as error:
        if _lacks_memory(error):
            raise MemoryError from None
        raise
    sides = (0, 0, 0) if made.pixels is None else made.pixels.shape[:3]
    samples = 0 if made.samples is None else len(made.samples)
    warnings = "\n".join(warning.replace("\n", " ") for warning in made.warnings)
    channel.send(wire.HOLDS, *sides, samples, made.fps, made.fitted, text=warnings)
    channel.receive(len(wire.GO))
    parts = [part for part in (made.pixels, made.samples) if part is not None]
    with mmap.mmap(result, sum(part.nbytes for part in parts)) as memory:
        for part in parts:
            memory.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)


def decode(job: Job, ask: Ask) -> DecodedData:
    """Decode an item. Raises InputError if it can't be decoded or is too large."""
    if not isinstance(job.content, bytes):
        return _pictures(job, job.content, ask)
    return {"audio": _audio, "image": _image, "video": _video}[job.kind](job, ask)


def read_audio(job: Job, item: Mapping[str, Any], ask: Ask, warn: Warn) -> Waveform:
    """Read a job's audio, as a message's item, at the checkpoint's sample rate."""
    rate = job.media.audio_rate
    asked = False

    def check(seconds: float) -> None:
        nonlocal asked
        if not asked:  # a file that is longer than stated is admitted again
            asked = True
            ask(Measured(seconds, 0, 4 * round(seconds * rate)))

    holds_s = longest_s(job.most_tokens, job.media.audio_tokens_per_s)
    return load_waveform(item, rate, job.where, holds_s, check, warn)


def _audio(job: Job, ask: Ask) -> DecodedData:
    warnings: list[str] = []
    samples = read_audio(job, job.item, ask, warnings.append)
    return DecodedData(samples=samples, warnings=tuple(warnings))


def _image(job: Job, ask: Ask) -> DecodedData:
    def check(height: int, width: int) -> None:
        size, _ = _kept_size(job, height, width)
        ask(Measured(0.0, height * width, 3 * math.prod(size)))

    warnings: list[str] = []
    picture = load_image(job.item, job.where, check, warnings.append)
    size, fitted = _kept_size(job, picture.height, picture.width)
    pixels = resize(picture, size) if fitted else np.asarray(picture)
    return DecodedData(pixels[None], fitted=fitted, warnings=tuple(warnings))


def _video(job: Job, ask: Ask) -> DecodedData:
    audio_rate = job.media.audio_rate if job.use_audio_in_video else None
    frames, fitted, warnings = 0, True, list[str]()

    def check(header: VideoHeader) -> None:
        nonlocal frames
        frames = header.frames
        size, _ = _kept_size(job, header.height, header.width, frames)
        audio = round(header.audio_s * job.media.audio_rate)
        kept = 3 * frames * math.prod(size) + 4 * audio
        seconds = max(header.seconds, header.audio_s)
        ask(Measured(seconds, header.height * header.width, kept))

    def fit(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        nonlocal fitted
        height, width, _ = frame.shape
        size, fitted = _kept_size(job, height, width, frames)
        return resize(Image.fromarray(frame), size)

    video = load_video(
        job.item,
        job.where,
        audio_rate=audio_rate,
        limit_s=longest_s(job.most_tokens, job.media.audio_tokens_per_s),
        check=check,
        fit=fit,
        threads=1,
        warn=warnings.append,
    )
    return DecodedData(video.frames, video.audio, video.fps, fitted, tuple(warnings))


def _pictures(job: Job, files: Sequence[bytes], ask: Ask) -> DecodedData:
    fps, frames = job.item["fps"], len(files)
    height = width = 0
    shown, fitted, pixels = (0, 0), True, np.empty(0, np.uint8)

    def check(*size: int) -> None:
        nonlocal height, width, shown, fitted, pixels
        if not height:  # the first one, before it is decoded
            height, width = size
            shown, fitted = _kept_size(job, height, width, frames)
            ask(Measured(frames / fps, height * width, 3 * frames * math.prod(shown)))
            pixels = np.empty((frames, *shown, 3), np.uint8)

    for at, file in enumerate(files):
        picture = load_image({"image": file}, f"{job.where}.video[{at}]", check)
        if (picture.height, picture.width) != (height, width):
            raise VideoError(
                f"{job.where} has frames of {width} x {height} and, at {at}, of {picture.width} x "
                f"{picture.height} pixels. Make them one size."
            )
        pixels[at] = resize(picture, shown)
    return DecodedData(pixels, None, fps, fitted)


def _kept_size(
    job: Job, height: int, width: int, frames: int | None = None
) -> tuple[tuple[int, int], bool]:
    """Return an image's size in memory, and whether that is the processor's size.

    The file's size is kept if rounding the sides to whole tokens would make an allowed image too
    narrow for the API. Raises the API's errors.
    """
    asked = SizeLimits.of(job.options)
    size = VisualSize(job.where, height, width, frames, asked, job.most_tokens)
    made = job.media.sizes.pixels(job.media.sizes.grid(size))
    fits = max(made) <= MAX_ASPECT * min(made)  # else the API rejects it
    return (made if fits else (height, width)), fits


def _lacks_memory(error: BaseException | None) -> bool:
    while error is not None:
        no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if no_memory or isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
