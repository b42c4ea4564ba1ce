"""A prompt's audio, images and videos as rows for the thinker."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from qwen3_omni_neuron.model.audio_encoder import tokens_of_windows
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.media.pixels import Visual
from qwen3_omni_neuron.prompt.prompt import Prompt


class Audio(Protocol):
    """The audio encoder of a target."""

    def encode(self, clips: Sequence[Tensor], /, first: int = 0, stop: int | None = None) -> Tensor:
        """Encode windows [first, stop) of a prompt's clips. Returns [tokens, hidden], in order.

        clips: float32 [mel_bins, frames] each; all of the prompt, since the longest determines
        every window's padding.
        """
        ...


class Vision(Protocol):
    """The vision encoder of a target."""

    def encode(self, visuals: Iterable[Visual], /) -> Tensor:
        """Encode images or videos. Returns [1 + deepstack, rows, hidden], in order."""
        ...


@dataclass(frozen=True)
class PromptMedia:
    """Rows for the thinker, in the order of the prompt.

    start: index in the prompt of the first of S tokens. filled: bool [S], true for tokens that the
    rows replace. rows: [filled, hidden]. visual: int64 [V], indices of the rows of images and
    videos. deepstack: [layers, V, hidden], added to these rows in the first layers.
    """

    start: int
    filled: Tensor
    rows: Tensor
    visual: Tensor
    deepstack: Tensor

    def added(self) -> Tensor | None:
        """Return what deepstack adds to each row, [layers, S, hidden]; None without pictures."""
        if not len(self.visual):
            return None
        layers, _, hidden = self.deepstack.shape
        added = self.deepstack.new_zeros(layers, len(self.filled), hidden)
        added[:, self.visual] = self.deepstack
        return added

    def part(self, start: int, stop: int) -> "PromptMedia":
        """Return the media of the prompt's tokens [start, stop).

        The prompt must have no media before this object's `start`.
        """
        first, last = start - self.start, stop - self.start
        before = int(self.filled[: max(0, first)].sum())
        earlier = self.filled.new_zeros(max(0, -first))
        filled = torch.cat((earlier, self.filled[max(0, first) : last]))
        seen = (self.visual >= first) & (self.visual < last)
        rows = self.rows[before : before + int(filled.sum())]
        return PromptMedia(start, filled, rows, self.visual[seen] - first, self.deepstack[:, seen])


class MediaEncoders:
    """The thinker's audio and vision encoder, for a prompt or a part of it."""

    def __init__(self, config: OmniConfig, audio: Audio, vision: Vision, dtype: torch.dtype):
        self._config, self._audio, self._vision, self._dtype = config, audio, vision, dtype

    @torch.inference_mode()
    def encode(self, prompt: Prompt, start: int = 0) -> PromptMedia | None:
        """Encode the media of a prompt's tokens from `start` on; None without media.

        Only audio windows and frames with such tokens are encoded.
        """
        c = self._config.thinker
        visuals = {c.image_token_id: prompt.images, c.video_token_id: prompt.videos}
        present = [token_id for token_id, of_kind in visuals.items() if of_kind]
        if prompt.audio_mel:
            present.append(c.audio_token_id)
        earlier, token_ids = prompt.token_ids[:start], prompt.token_ids[start:]
        filled = torch.isin(token_ids, torch.tensor(present))
        kinds = token_ids[filled]
        if not len(kinds):
            return None
        levels = 1 + len(c.vision.deepstack_layers)
        rows = torch.empty(levels, len(kinds), c.text.hidden_size, dtype=self._dtype)
        for token_id in kinds.unique().tolist():
            ours = kinds == token_id
            begin = int((earlier == token_id).sum())
            end = begin + int(ours.sum())
            if token_id == c.audio_token_id:
                rows[0, ours] = self._audio_rows(prompt.audio_mel, begin, end)
            else:
                rows[:, ours] = self._visual_rows(visuals[token_id], begin, end)
        visual = kinds != c.audio_token_id
        indices = filled.nonzero().flatten()[visual]
        return PromptMedia(start, filled, rows[0], indices, rows[1:, visual])

    def rows(self, prompt: Prompt, start: int, encoded: PromptMedia | None) -> PromptMedia | None:
        """Return the media of a prompt's tokens from `start` on, reusing `encoded`."""
        if encoded is None:
            return self.encode(prompt, start)
        return encoded.part(start, len(prompt))

    def _audio_rows(self, clips: Sequence[Tensor], begin: int, end: int) -> Tensor:
        ends = list(accumulate(tokens_of_windows(clips, self._config.thinker.audio), initial=0))
        first = bisect_right(ends, begin) - 1
        rows = self._audio.encode(clips, first, bisect_left(ends, end))
        return rows[begin - ends[first] : end - ends[first]]

    def _visual_rows(self, visuals: Sequence[Visual], begin: int, end: int) -> Tensor:
        needed, before, at = [], 0, 0  # at: rows of visuals so far; before: rows left out
        for visual in visuals:
            frames, height, width = visual.grid
            size = height * width // self._config.thinker.vision.merge_size**2
            first = min(max(0, begin - at) // size, frames)
            stop = min(-(-max(0, end - at) // size), frames)
            if first < stop:
                needed.append(visual.part(first, stop))
            if at <= begin:
                before = at + first * size
            at += frames * size
        return self._vision.encode(needed)[:, begin - before : end - before]
