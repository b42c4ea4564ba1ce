"""A prompt's audio, images and videos as rows for the thinker."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import Patches, Prompt
from qwen3_omni_neuron.model.audio_encoder import tokens_of_windows
from qwen3_omni_neuron.model.config import OmniConfig


class Audio(Protocol):
    """The audio encoder of a target."""

    def encode(self, clips: Sequence[Tensor], /, skip: int = 0) -> Tensor:
        """Encode the clips of a prompt without their first `skip` windows.

        clips: float32 [mel_bins, frames] each; all of them, since the longest one decides on the
        padding of every window. Returns [tokens, hidden], in order.
        """
        ...


class Vision(Protocol):
    """The vision encoder of a target."""

    def encode(self, patches: Iterable[Patches], /) -> Tensor:
        """Encode images or videos. Returns [1 + deepstack, rows, hidden], in order."""
        ...


@dataclass(frozen=True)
class PromptMedia:
    """Rows for the thinker, in the order of the prompt.

    filled: bool [S], true for the tokens that the rows replace, of a prompt or its last S tokens.
    rows: [filled, hidden]. visual: int64 [V], the indices, among the S, of the rows of images and
    videos. deepstack: [layers, V, hidden], added to these rows in the thinker's first layers.
    """

    filled: Tensor
    rows: Tensor
    visual: Tensor
    deepstack: Tensor


class MediaEncoders:
    """The audio and the vision encoder of the thinker, called for whole prompts or their ends."""

    def __init__(self, config: OmniConfig, audio: Audio, vision: Vision, dtype: torch.dtype):
        self._config, self._audio, self._vision, self._dtype = config, audio, vision, dtype

    def encode(self, prompt: Prompt, start: int = 0) -> PromptMedia | None:
        """Encode the media of a prompt's tokens from `start` on.

        Of the items that begin before `start`, the windows of audio and the frames of images and
        videos are encoded that have a token from there on. Returns None where no media are left.
        """
        c = self._config.thinker
        visuals = {c.image_token_id: prompt.images, c.video_token_id: prompt.videos}
        present = [token_id for token_id, patches in visuals.items() if patches]
        if prompt.audio_mel:
            present.append(c.audio_token_id)
        token_ids = prompt.token_ids[start:]
        filled = torch.isin(token_ids, torch.tensor(present))
        kinds, earlier = token_ids[filled], prompt.token_ids[:start]
        if not len(kinds):
            return None
        levels = 1 + len(c.vision.deepstack_layers)
        rows = torch.empty(levels, len(kinds), c.text.hidden_size, dtype=self._dtype)
        for token_id in kinds.unique().tolist():
            before = int((earlier == token_id).sum())
            if token_id == c.audio_token_id:
                rows[0, kinds == token_id] = self._audio_rows(prompt.audio_mel, before)
            else:
                rows[:, kinds == token_id] = self._visual_rows(visuals[token_id], before)
        visual = kinds != c.audio_token_id
        indices = filled.nonzero().flatten()[visual]
        return PromptMedia(filled, rows[0], indices, rows[1:, visual])

    def _audio_rows(self, clips: Sequence[Tensor], before: int) -> Tensor:
        """Return the rows of audio after the first `before`, [tokens, hidden]."""
        skip = 0
        for tokens in tokens_of_windows(clips, self._config.thinker.audio):
            if before < tokens:
                break
            before -= tokens
            skip += 1
        return self._audio.encode(clips, skip)[before:]

    def _visual_rows(self, visuals: Sequence[Patches], before: int) -> Tensor:
        """Return the rows of images or videos after the first `before`: see Vision.encode."""
        frame_rows = [self._frame_rows(visual) for visual in visuals]
        first = 0
        while before >= (rows := visuals[first].grid[0] * frame_rows[first]):
            before -= rows
            first += 1
        skipped, before = divmod(before, frame_rows[first])
        rest = _frames_from(visuals[first], skipped), *visuals[first + 1 :]
        return self._vision.encode(rest)[:, before:]

    def _frame_rows(self, visual: Patches) -> int:
        _, height, width = visual.grid
        return height * width // self._config.thinker.vision.merge_size**2


def _frames_from(visual: Patches, first: int) -> Patches:
    """Return the patches of the frames from `first` on."""
    frames, height, width = visual.grid
    values = visual.values[first * height * width :]
    return Patches(values, (frames - first, height, width))
