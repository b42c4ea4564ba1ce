"""A prompt's media, encoded: what takes the places of its placeholders."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import Patches, Prompt
from qwen3_omni_neuron.model.config import OmniConfig


class Audio(Protocol):
    """The audio encoder, on whatever it runs."""

    def encode(self, clips: Sequence[Tensor]) -> Tensor:
        """[tokens, hidden] of all clips, in order. clips: float32 [mel_bins, frames] each."""
        ...


class Vision(Protocol):
    """The vision encoder, on whatever it runs."""

    def encode(self, pictures: Iterable[Patches]) -> Tensor:
        """[1 + deepstack, rows, hidden] of all pictures, in order."""
        ...


@dataclass(frozen=True)
class PromptMedia:
    """Rows for the thinker, in the order of the prompt.

    filled: bool [S], which of the prompt's tokens they stand for. rows: [filled, hidden]. visual:
    int64 [V], the places in the prompt of images and videos among them. deepstack: [layers, V,
    hidden], what the thinker's first layers add there.
    """

    filled: Tensor
    rows: Tensor
    visual: Tensor
    deepstack: Tensor


class MediaEncoders:
    """The thinker's audio and vision encoders, as its prompts need them."""

    def __init__(self, config: OmniConfig, audio: Audio, vision: Vision, dtype: torch.dtype):
        self._config, self._audio, self._vision, self._dtype = config, audio, vision, dtype

    def encode(self, prompt: Prompt) -> PromptMedia | None:
        """Encode all media of a prompt; None where it has none."""
        c = self._config.thinker
        pictures = {c.image_token_id: prompt.images, c.video_token_id: prompt.videos}
        present = [token_id for token_id, seen in pictures.items() if seen]
        if prompt.audio_mel:
            present.append(c.audio_token_id)
        if not present:
            return None
        filled = torch.isin(prompt.token_ids, torch.tensor(present))
        kinds = prompt.token_ids[filled]
        levels = 1 + len(c.vision.deepstack_layers)
        rows = torch.empty(levels, len(kinds), c.text.hidden_size, dtype=self._dtype)
        if prompt.audio_mel:
            rows[0, kinds == c.audio_token_id] = self._audio.encode(prompt.audio_mel)
        for token_id, seen in pictures.items():
            if seen:
                rows[:, kinds == token_id] = self._vision.encode(seen)
        visual = kinds != c.audio_token_id
        places = filled.nonzero().flatten()[visual]
        return PromptMedia(filled, rows[0], places, rows[1:, visual])
