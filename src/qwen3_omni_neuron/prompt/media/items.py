"""Media items of a conversation after reading: audio, images and videos for the models."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.clip import Clip, GrowingClip
from qwen3_omni_neuron.prompt.media.image import load_image
from qwen3_omni_neuron.prompt.media.log_mel import MelSettings
from qwen3_omni_neuron.prompt.media.pixels import Visual
from qwen3_omni_neuron.prompt.media.resizer import Resizer
from qwen3_omni_neuron.prompt.media.settings import MediaSettings
from qwen3_omni_neuron.prompt.media.sizes import SizeLimits
from qwen3_omni_neuron.prompt.media.video import VideoHeader, load_video


@dataclass(frozen=True)
class AudioItem:
    """Audio clip."""

    clip: Clip
    kind = "audio"


@dataclass(frozen=True)
class ImageItem:
    """Image, resized."""

    visual: Visual
    kind = "image"
    clip = None
    seconds_per_frame = 0.0  # it has one frame


@dataclass(frozen=True)
class VideoItem:
    """Video, resized.

    seconds_per_frame: time from one frame of its grid to the next. clip: its audio, None if it has
    no audio or it isn't wanted.
    """

    visual: Visual
    seconds_per_frame: float
    clip: Clip | None
    kind = "video"


Media = AudioItem | ImageItem | VideoItem


class MediaLoader:
    """Reader of a conversation's media items.

    mel: settings of the audio features. settings: the checkpoint's settings. use_audio_in_video:
    whether a video's audio is wanted. most_tokens: maximum number of tokens of one item; a longer
    item is refused before it is decoded.
    """

    def __init__(
        self,
        resizer: Resizer,
        mel: MelSettings,
        settings: MediaSettings,
        use_audio_in_video: bool,
        most_tokens: int | None,
    ):
        self._resizer, self._mel, self._most_tokens = resizer, mel, most_tokens
        self._audio_rate = mel.rate if use_audio_in_video else None
        self._limit_s = settings.longest_audio_s(most_tokens)

    def __call__(self, kind: str, item: Mapping[str, Any], where: str) -> Media:
        """Read an item of `kind`: "audio", "image" or "video". where: its name in errors.

        Raises AudioError, ImageError, VideoError or PromptTooLongError.
        """
        if kind == "audio":
            waveform = load_waveform(item, self._mel.rate, where, self._limit_s)
            return AudioItem(Clip(waveform, self._mel))
        asked = SizeLimits(item.get("min_pixels"), item.get("max_pixels"), self._most_tokens)
        if kind == "image":
            check = partial(self._resizer.sizes.image_grid, where=where, asked=asked)
            return ImageItem(self._resizer.image(load_image(item, where, check), where, asked))

        def check_video(header: VideoHeader) -> None:
            size = (header.frames, header.height, header.width)
            self._resizer.sizes.video_grid(*size, where, asked)

        video = load_video(
            item, where, audio_rate=self._audio_rate, limit_s=self._limit_s, check=check_video
        )
        visual = self._resizer.video(video.frames, where, asked)
        clip = None if video.audio is None else Clip(video.audio, self._mel)
        return VideoItem(visual, self._resizer.sizes.temporal_patch_size / video.fps, clip)

    def growing_clip(self, sampling_rate: Any, where: str) -> GrowingClip:
        """Begin a clip whose pieces have this rate. Raises AudioError for the rate."""
        return GrowingClip(sampling_rate, self._mel, where, self._limit_s)
