"""Video of a message item -> frames, their rate, and audio, checked."""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from qwen3_omni_neuron.errors import ImageError, VideoError, format_value
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.fields import (
    LEAST_FPS,
    MOST_FPS,
    Warn,
    ignore,
    real_number,
    source_of,
)
from qwen3_omni_neuron.prompt.media.image import load_image
from qwen3_omni_neuron.prompt.media.video_file import (
    FRAMES_A_PATCH,
    Check,
    Fit,
    Frames,
    Sampling,
    Video,
    VideoHeader,
    keep_whole,
    read_video_file,
)

__all__ = ["Video", "VideoHeader", "frame_rate", "load_video"]


def load_video(
    item: Mapping[str, Any],
    where: str,
    *,
    audio_rate: int | None,
    limit_s: float = math.inf,
    check: Check = ignore,
    fit: Fit = keep_whole,
    threads: int = 0,
    warn: Warn = ignore,
) -> Video:
    """Read a video item of a message.

    item["video"] is a path or the bytes of a video file, or frames of one size: an array or tensor
    [n, height, width, channels], or a list of images. Other fields: see docs/options.md.
    audio_rate: the result's, in Hz; None: no audio. Others: see `read_video_file`.
    Raises VideoError, or AudioError and PromptTooLongError for its audio.
    Source: transformers Qwen2VLVideoProcessor (fps, min_frames, max_frames), qwen-omni-utils
    smart_nframes (nframes), qwen-vl-utils (video_start, video_end).
    """
    source = item.get("video")
    if source is None:
        raise VideoError(f'{where} has no "video": give a path, bytes, or frames with their fps.')
    audio = None
    if audio_rate is not None and item.get("audio") is not None:
        audio = load_waveform(item, audio_rate, where, limit_s, warn=warn)
        audio_rate = None
    if (file := source_of(source, where, VideoError)) is None:
        fps = frame_rate(item.get("fps"), None, where)
        return Video(_frames(source, where), fps, audio)
    video = read_video_file(
        file,
        where,
        sampling=_sampling(item, where),
        audio_rate=audio_rate,
        limit_s=limit_s,
        check=check,
        fit=fit,
        threads=threads,
        warn=warn,
    )
    return video if audio is None else replace(video, audio=audio)


def frame_rate(fps: Any, usual: float | None, where: str) -> float:
    """Return a video's rate. usual: the default, or None. Raises VideoError."""
    if fps is None:
        if usual is None:
            raise VideoError(
                f'{where} is frames without their rate. Add "fps": 2.0, or whatever it is.'
            )
        return usual
    rate = real_number(fps)
    if rate is None or not LEAST_FPS <= rate <= MOST_FPS:
        raise VideoError(
            f"{where} has fps {format_value(fps)}; it must be a number of frames a second, "
            f"above 0: {LEAST_FPS:g} to {MOST_FPS:g}."
        )
    return rate


def _sampling(item: Mapping[str, Any], where: str) -> Sampling:
    usual = Sampling()
    nframes, low, high = (item.get(name) for name in ("nframes", "min_frames", "max_frames"))
    most = usual.max_frames if high is None else high
    least = min(usual.min_frames, most) if low is None else low
    if least > most:
        raise VideoError(
            f"{where} has min_frames {least}, and max_frames is {most}. Give a larger max_frames."
        )
    end = item.get("video_end")
    return Sampling(
        fps=frame_rate(item.get("fps"), usual.fps, where),
        nframes=None if nframes is None else round(nframes / FRAMES_A_PATCH) * FRAMES_A_PATCH,
        min_frames=least,
        max_frames=most,
        start_s=_exact(item.get("video_start") or 0),
        end_s=None if end is None else _exact(end),
    )


def _exact(seconds: float) -> Fraction:
    """Return seconds exactly: 0.1 is a tenth, not the nearest float."""
    return Fraction(str(float(seconds)))


def _frames(source: Any, where: str) -> Frames:
    """Return frames of one size as uint8 [n, height, width, 3]."""
    try:
        n = len(source)
        shape = None if isinstance(source, list | tuple) else list(source.shape)
    except Exception as error:
        kind = type(source).__name__
        raise VideoError(
            f"{where} is neither a path, bytes nor frames, but {kind}. Give one of these."
        ) from error
    if shape is not None and len(shape) != 4:
        raise VideoError(
            f"{where} is an array of shape {shape}. Give frames [n, height, width, channels]."
        )
    if not n:
        raise VideoError(f"{where} is a video without frames. Give at least one.")
    kept: Frames | None = None
    for index in range(n):
        place = f"{where}.video[{index}]"
        try:
            frame = source[index]
        except Exception as error:
            raise VideoError(f"{place} can't be read ({format_value(error)}).") from error
        try:
            picture = load_image({"image": frame}, place)
        except ImageError as error:
            raise VideoError(str(error)) from error
        pixels = np.asarray(picture)
        if kept is None:
            kept = np.empty((n, *pixels.shape), np.uint8)
        if pixels.shape != kept.shape[1:]:
            raise VideoError(
                f"{where} has frames of {kept.shape[2]} x {kept.shape[1]} and, at {index}, of "
                f"{pixels.shape[1]} x {pixels.shape[0]} pixels. Make them one size."
            )
        kept[index] = pixels
    assert kept is not None
    return kept
