"""Media items of a conversation, read: audio, images and videos as the models take them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from qwen3_omni_neuron.conversation.media.audio import Waveform, load_waveform
from qwen3_omni_neuron.conversation.media.image import load_image
from qwen3_omni_neuron.conversation.media.patches import PatchMaker, SizeLimits
from qwen3_omni_neuron.conversation.media.video import load_video
from qwen3_omni_neuron.conversation.prompt import Patches


@dataclass(frozen=True)
class AudioItem:
    """Audio clip: mono float32 samples."""

    waveform: Waveform
    kind = "audio"


@dataclass(frozen=True)
class ImageItem:
    """Image, cut into patches."""

    patches: Patches
    kind = "image"
    waveform = None
    seconds_per_frame = 0.0  # it has one frame


@dataclass(frozen=True)
class VideoItem:
    """Video, cut into patches.

    seconds_per_frame: from one frame of its patches to the next. waveform: its audio, None where
    it has none or none is wanted.
    """

    patches: Patches
    seconds_per_frame: float
    waveform: Waveform | None
    kind = "video"


Media = AudioItem | ImageItem | VideoItem


class MediaLoader:
    """Reader of one request's media items.

    rate: sampling rate of the waveforms, in Hz. use_audio_in_video: whether a video's audio is
    wanted. most_tokens: maximum of one item; a longer one is refused before it is decoded.
    audio_tokens_per_s: tokens that a second of audio becomes.
    """

    def __init__(
        self,
        patches: PatchMaker,
        rate: int,
        use_audio_in_video: bool,
        most_tokens: int | None,
        audio_tokens_per_s: float,
    ):
        self._patches, self._rate, self._most_tokens = patches, rate, most_tokens
        self._audio_rate = rate if use_audio_in_video else None
        self._limit_s = float("inf") if most_tokens is None else most_tokens / audio_tokens_per_s

    def __call__(self, kind: str, item: Mapping[str, Any], where: str) -> Media:
        """Read an item of `kind`: "audio", "image" or "video". where: names it in errors.

        Raises AudioError, ImageError, VideoError or PromptTooLongError.
        """
        if kind == "audio":
            return AudioItem(load_waveform(item, self._rate, where, self._limit_s))
        asked = SizeLimits(item.get("min_pixels"), item.get("max_pixels"), self._most_tokens)
        if kind == "image":
            return ImageItem(self._patches.image(load_image(item, where), where, asked))
        check = partial(self._patches.video_grid, where=where, asked=asked)
        video = load_video(item, where, audio_rate=self._audio_rate, check=check)
        patches = self._patches.video(video.frames, where, asked)
        return VideoItem(patches, self._patches.temporal_patch_size / video.fps, video.audio)
