"""Media items of a conversation, read: sound, pictures and films as the models take them."""

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
class Sound:
    """An audio clip."""

    waveform: Waveform
    kind = "audio"


@dataclass(frozen=True)
class Picture:
    """An image."""

    patches: Patches
    kind = "image"
    waveform = None
    seconds_per_frame = 0.0  # there is one


@dataclass(frozen=True)
class Film:
    """A video. seconds_per_frame: from one frame of its patches to the next. waveform: its own
    sound, where it has one and it is wanted."""

    patches: Patches
    seconds_per_frame: float
    waveform: Waveform | None
    kind = "video"


Media = Sound | Picture | Film


class MediaLoader:
    """Reads media items for one request.

    rate: of the sound, in Hz. use_audio_in_video: whether a video's own sound is wanted.
    most_tokens: that an item may have; longer ones are refused before they are decoded.
    sound_tokens_per_s: of a clip.
    """

    def __init__(
        self,
        patches: PatchMaker,
        rate: int,
        use_audio_in_video: bool,
        most_tokens: int | None,
        sound_tokens_per_s: float,
    ):
        self._patches, self._rate, self._most_tokens = patches, rate, most_tokens
        self._audio_rate = rate if use_audio_in_video else None
        self._limit_s = float("inf") if most_tokens is None else most_tokens / sound_tokens_per_s

    def __call__(self, kind: str, item: Mapping[str, Any], where: str) -> Media:
        """What an item of `kind` ("audio", "image" or "video") holds. where: names it in errors.

        Raises AudioError, ImageError, VideoError or PromptTooLongError.
        """
        if kind == "audio":
            return Sound(load_waveform(item, self._rate, where, self._limit_s))
        asked = SizeLimits(item.get("min_pixels"), item.get("max_pixels"), self._most_tokens)
        if kind == "image":
            return Picture(self._patches.image(load_image(item, where), where, asked))
        check = partial(self._patches.video_grid, where=where, asked=asked)
        video = load_video(item, where, audio_rate=self._audio_rate, check=check)
        patches = self._patches.video(video.frames, where, asked)
        return Film(patches, self._patches.temporal_patch_size / video.fps, video.audio)
