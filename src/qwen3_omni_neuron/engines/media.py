"""A prompt's audio, images and videos as rows for the thinker."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import Patches, Prompt
from qwen3_omni_neuron.model.config import OmniConfig


class Audio(Protocol):
    """The audio encoder of a target."""

    def encode(self, clips: Sequence[Tensor], /) -> Tensor:
        """Encode clips, float32 [mel_bins, frames] each. Returns [tokens, hidden], in order."""
        ...


class Vision(Protocol):
    """The vision encoder of a target."""

    def encode(self, patches: Iterable[Patches], /) -> Tensor:
        """Encode images or videos. Returns [1 + deepstack, rows, hidden], in order."""
        ...


@dataclass(frozen=True)
class PromptMedia:
    """Rows for the thinker, in the order of the prompt.

    filled: bool [S], true for the prompt's tokens that the rows replace. rows: [filled, hidden].
    visual: int64 [V], the prompt's indices of the rows of images and videos. deepstack: [layers, V,
    hidden], added to these rows in the thinker's first layers.
    """

    filled: Tensor
    rows: Tensor
    visual: Tensor
    deepstack: Tensor


class MediaEncoders:
    """The audio and the vision encoder of the thinker, called for whole prompts."""

    def __init__(self, config: OmniConfig, audio: Audio, vision: Vision, dtype: torch.dtype):
        self._config, self._audio, self._vision, self._dtype = config, audio, vision, dtype

    def encode(self, prompt: Prompt) -> PromptMedia | None:
        """Encode all media of a prompt. Returns None where it has none."""
        c = self._config.thinker
        visuals = {c.image_token_id: prompt.images, c.video_token_id: prompt.videos}
        present = [token_id for token_id, patches in visuals.items() if patches]
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
        for token_id, patches in visuals.items():
            if patches:
                rows[:, kinds == token_id] = self._vision.encode(patches)
        visual = kinds != c.audio_token_id
        indices = filled.nonzero().flatten()[visual]
        return PromptMedia(filled, rows[0], indices, rows[1:, visual])
