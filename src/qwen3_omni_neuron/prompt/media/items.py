"""Media items of a conversation, prepared for the models: audio, images and videos."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.prompt.media.audio import load_waveform, longest_s
from qwen3_omni_neuron.prompt.media.image import load_image
from qwen3_omni_neuron.prompt.media.log_mel import Clip, GrowingClip, MelSettings
from qwen3_omni_neuron.prompt.media.pixels import (
    Grid,
    MediaSettings,
    PixelSettings,
    SizeLimits,
    Visual,
    VisualSize,
    resize,
)
from qwen3_omni_neuron.prompt.media.video import VideoHeader, load_video

Item = dict[str, Any]


@dataclass(frozen=True)
class AudioItem:
    """Audio clip. warnings: see prompt.media.fields.Warn."""

    clip: Clip
    warnings: tuple[str, ...] = ()
    kind = "audio"

    @property
    def item(self) -> Item:
        """A message item with the same clip."""
        return {"type": "audio", **self.clip.item}


@dataclass(frozen=True)
class ImageItem:
    """Image, resized."""

    visual: Visual
    warnings: tuple[str, ...] = ()
    kind = "image"
    clip = None
    seconds_per_frame = 0.0

    @property
    def item(self) -> Item:
        """A message item with the same pixels."""
        (pixels,) = self.visual.pixels
        return {"type": "image", "image": pixels, **_size(pixels)}


@dataclass(frozen=True)
class VideoItem:
    """Video, resized. fps: frame rate. clip: its audio, or None."""

    visual: Visual
    fps: float
    clip: Clip | None
    warnings: tuple[str, ...] = ()
    kind = "video"

    @property
    def seconds_per_frame(self) -> float:
        """Time from one frame of its grid to the next."""
        return self.visual.settings.sizes.temporal_patch_size / self.fps

    @property
    def item(self) -> Item:
        """A message item with the same pixels and clip."""
        pixels = self.visual.pixels
        made = {"type": "video", "video": pixels, "fps": self.fps, **_size(pixels[0])}
        return made if self.clip is None else made | self.clip.item


Media = AudioItem | ImageItem | VideoItem


def _size(picture: NDArray[np.uint8]) -> Item:
    pixels = picture.shape[0] * picture.shape[1]
    return {"min_pixels": pixels, "max_pixels": pixels}


class MediaLoader:
    """Reader of a conversation's media items.

    most_tokens: limit per item; larger ones are refused before they are decoded or resized.
    """

    def __init__(
        self,
        pixels: PixelSettings,
        mel: MelSettings,
        settings: MediaSettings,
        use_audio_in_video: bool,
        most_tokens: int | None,
    ):
        self._pixels, self._mel, self._settings = pixels, mel, settings
        self._audio_rate = mel.rate if use_audio_in_video else None
        self._most_tokens = most_tokens
        self._limit_s = longest_s(most_tokens, settings.audio_tokens_per_s)

    def read(self, kind: str, item: Mapping[str, Any], where: str) -> Media:
        """Read an item. kind: "audio", "image" or "video". where: its name in errors.

        Raises AudioError, ImageError, VideoError or PromptTooLongError.
        """
        warnings: list[str] = []
        warn, rate, sizes = warnings.append, self._mel.rate, self._pixels.sizes
        if kind == "audio":
            waveform = load_waveform(item, rate, where, self._limit_s, warn=warn)
            return AudioItem(Clip(waveform, self._mel), tuple(warnings))
        asked = SizeLimits.of(item)
        if kind == "image":
            picture = load_image(item, where, warn=warn)
            grid = sizes.grid(
                VisualSize(where, picture.height, picture.width, None, asked, self._most_tokens)
            )
            return ImageItem(self._pixels.image(picture, grid), tuple(warnings))
        return self._video(item, where, asked)

    def _video(self, item: Mapping[str, Any], where: str, asked: SizeLimits) -> VideoItem:
        warnings: list[str] = []
        sizes, frames = self._pixels.sizes, 0
        grid: Grid | None = None

        def check(header: VideoHeader) -> None:
            nonlocal frames
            frames = header.frames
            sizes.grid(
                VisualSize(where, header.height, header.width, frames, asked, self._most_tokens)
            )

        def fit(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
            """Resize each frame at once: unresized ones may take gigabytes."""
            from PIL import Image

            nonlocal grid
            height, width, _ = frame.shape
            grid = grid or sizes.grid(
                VisualSize(where, height, width, frames, asked, self._most_tokens)
            )
            return resize(Image.fromarray(frame), sizes.pixels(grid))

        video = load_video(
            item,
            where,
            audio_rate=self._audio_rate,
            limit_s=self._limit_s,
            check=check,
            fit=fit,
            warn=warnings.append,
        )
        count, height, width, _ = video.frames.shape
        grid = grid or sizes.grid(VisualSize(where, height, width, count, asked, self._most_tokens))
        visual = self._pixels.video(video.frames, grid)
        clip = None if video.audio is None else Clip(video.audio, self._mel)
        return VideoItem(visual, video.fps, clip, tuple(warnings))

    def prepared(self, kind: str, item: Mapping[str, Any], _where: str) -> Media:
        """Return a stored turn's item, as `AudioItem.item` and others give it, unchanged."""
        if kind == "audio":
            return AudioItem(Clip(item["audio"], self._mel))
        if kind == "image":
            return ImageItem(Visual(item["image"][None], self._pixels))
        clip = None if item.get("audio") is None else Clip(item["audio"], self._mel)
        return VideoItem(Visual(item["video"], self._pixels), item["fps"], clip)

    def growing_clip(self, sampling_rate: Any, where: str) -> GrowingClip:
        """Return an empty clip. Raises AudioError for an unusable rate."""
        return GrowingClip(sampling_rate, self._mel, where, self._limit_s)
