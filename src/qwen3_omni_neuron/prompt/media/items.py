"""Media items of a conversation after reading: audio, images and videos for the models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import AudioError
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.clip import Clip, GrowingClip
from qwen3_omni_neuron.prompt.media.log_mel import MelSettings
from qwen3_omni_neuron.prompt.media.pixels import PixelSettings, Visual, resize
from qwen3_omni_neuron.prompt.media.sizes import Grid, MediaSettings, VisualSize
from qwen3_omni_neuron.prompt.media.video import VideoHeader, frame_rate, load_video
from qwen3_omni_neuron.prompt.media.visual_size import evenly, read_image, sound_tokens, visual_size

Item = dict[str, Any]


@dataclass(frozen=True)
class AudioItem:
    """Audio clip. warnings: see prompt.media.fields.Warn."""

    clip: Clip
    warnings: tuple[str, ...] = ()
    kind = "audio"

    @property
    def item(self) -> Item:
        """The item of a message that gives the same clip."""
        return {"type": "audio", **self.clip.item}


@dataclass(frozen=True)
class ImageItem:
    """Image, resized. warnings: see prompt.media.fields.Warn."""

    visual: Visual
    warnings: tuple[str, ...] = ()
    kind = "image"
    clip = None
    seconds_per_frame = 0.0  # it has one frame

    @property
    def item(self) -> Item:
        """The item of a message that gives the same pixels."""
        (pixels,) = self.visual.pixels
        return {"type": "image", "image": pixels, **_size(pixels)}


@dataclass(frozen=True)
class VideoItem:
    """Video, resized.

    fps: rate of its pictures. clip: its audio, None if it has no audio or it isn't wanted.
    warnings: see prompt.media.fields.Warn.
    """

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
        """The item of a message that gives the same pixels and the same clip."""
        pixels = self.visual.pixels
        made = {"type": "video", "video": pixels, "fps": self.fps, **_size(pixels[0])}
        return made if self.clip is None else made | self.clip.item


Media = AudioItem | ImageItem | VideoItem


def _is_waveform(array: NDArray[Any]) -> bool:
    return array.dtype == np.float32 and array.ndim == 1 and bool(np.isfinite(array).all())


def _size(picture: NDArray[np.uint8]) -> Item:
    """Return the limits with which a picture keeps its size."""
    pixels = picture.shape[0] * picture.shape[1]
    return {"min_pixels": pixels, "max_pixels": pixels}


@dataclass(frozen=True)
class Unread:
    """Image or video that is read when its share of the context is known.

    warnings: those about the sound that is given beside a video, which is read already.
    """

    kind: str
    item: Mapping[str, Any]
    size: VisualSize
    warnings: tuple[str, ...] = ()


class MediaLoader:
    """Reader of a conversation's media items: `begin` for each of them, then `finish` for all.

    pixels: settings of the pixels. mel: settings of the audio features. settings: the checkpoint's
    settings. use_audio_in_video: whether a video's audio is wanted. most_tokens: maximum number of
    tokens of one clip; a longer one is refused before it is decoded.
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
        self._limit_s = settings.longest_audio_s(most_tokens)

    def begin(self, kind: str, item: Mapping[str, Any], where: str) -> AudioItem | Unread:
        """Read audio, and of an image or a video its size.

        Sound that is given beside a video is read, too. kind: "audio", "image" or "video". where:
        name of the item in errors. Raises AudioError, ImageError, VideoError or PromptTooLongError.
        """
        warnings: list[str] = []
        rate, hears = self._mel.rate, self._audio_rate is not None
        beside = kind == "video" and hears and item.get("audio") is not None
        if kind == "audio" or beside:
            waveform = load_waveform(item, rate, where, self._limit_s, warn=warnings.append)
            if kind == "audio":
                return AudioItem(Clip(waveform, self._mel), tuple(warnings))
            item = {**item, "audio": waveform, "sampling_rate": rate}
        heard = self._settings if hears else None
        size = visual_size(kind, item, where, heard, warnings.append)
        if beside:
            tokens = sound_tokens(len(waveform) / rate, self._settings)
            size = replace(size, sound_tokens=tokens)
        self._pixels.sizes.exact_grid(size)
        return Unread(kind, item, size, tuple(warnings))

    def finish(
        self, found: "Sequence[Media | Unread]", shares: Sequence[int] | None
    ) -> list[Media]:
        """Read the images and videos among a conversation's items.

        shares: most tokens of each item, None: any number; see prompt.fitting. Raises
        ImageError, VideoError, AudioError or PromptTooLongError.
        """
        most: Sequence[int | None] = [None] * len(found) if shares is None else shares
        return [
            self._read(item, share) if isinstance(item, Unread) else item
            for item, share in zip(found, most, strict=True)
        ]

    def _read(self, unread: Unread, most_tokens: int | None) -> Media:
        warnings = list(unread.warnings)
        warn, item, sizes = warnings.append, unread.item, self._pixels.sizes
        asked = replace(unread.size.asked, most_tokens=most_tokens)
        size = replace(unread.size, asked=asked)
        if unread.kind == "image":
            made = read_image(item, size.where, sizes, asked, warn=warn)
            return ImageItem(self._pixels.image(*made), tuple(warnings))
        item, frames = sizes.fewer_frames(item, size)
        grid: Grid | None = None

        def grid_of(frame: NDArray[np.uint8]) -> Grid:
            nonlocal size
            size = replace(size, height=frame.shape[0], width=frame.shape[1])  # upright
            return sizes.grid(replace(size, frames=frames))

        def check(header: VideoHeader) -> None:
            height, width = header.height, header.width
            sizes.grid(replace(size, frames=header.frames, height=height, width=width))

        def fit(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
            """Resize a frame of a file at once: together they may take gigabytes."""
            from PIL import Image

            nonlocal grid
            grid = grid or grid_of(frame)
            return resize(Image.fromarray(frame), sizes.pixels(grid))

        video = load_video(
            item,
            size.where,
            audio_rate=self._audio_rate,
            limit_s=self._limit_s,
            check=check,
            fit=fit,
            warn=warn,
        )
        chosen = evenly(video, frames)  # frames of a file are chosen already
        visual = self._pixels.video(chosen.frames, grid or grid_of(chosen.frames[0]))
        sizes.warn_of_shrinking(size, visual.grid, warn)
        clip = None if video.audio is None else Clip(video.audio, self._mel)
        return VideoItem(visual, chosen.fps, clip, tuple(warnings))

    def prepared(self, kind: str, item: Mapping[str, Any], where: str) -> Media:
        """Take an item of a stored turn: its samples and pixels are used as they are.

        item: in the form of `AudioItem.item`, `ImageItem.item` or `VideoItem.item`.
        Raises AudioError, ImageError or VideoError for any other form.
        """
        if kind == "audio":
            return AudioItem(self._prepared_clip(item, where))
        if kind == "image":
            pixels = item.get("image")
            pictures = pixels[None] if isinstance(pixels, np.ndarray) else pixels
            return ImageItem(self._pixels.prepared(pictures, where))
        visual = self._pixels.prepared(item.get("video"), where)
        clip = None if item.get("audio") is None else self._prepared_clip(item, where)
        return VideoItem(visual, frame_rate(item.get("fps"), None, where), clip)

    def _prepared_clip(self, item: Mapping[str, Any], where: str) -> Clip:
        samples, rate = item.get("audio"), self._mel.rate
        if not isinstance(samples, np.ndarray) or not _is_waveform(samples):
            raise AudioError(f"{where} has no samples, finite float32 [samples].")
        if item.get("sampling_rate") != rate:
            raise AudioError(f"{where} has another sampling_rate than the model, {rate} Hz.")
        return Clip(samples, self._mel)

    def growing_clip(self, sampling_rate: Any, where: str) -> GrowingClip:
        """Begin a clip whose pieces have this rate. Raises AudioError for the rate."""
        return GrowingClip(sampling_rate, self._mel, where, self._limit_s)
