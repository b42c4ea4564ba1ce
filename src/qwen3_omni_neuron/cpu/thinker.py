"""The thinker on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.cpu.audio import CpuAudio
from qwen3_omni_neuron.cpu.slots import Numbers, Slots
from qwen3_omni_neuron.cpu.vision import CpuVision
from qwen3_omni_neuron.model.talker_prompt import media_mask
from qwen3_omni_neuron.model.thinker import Thinker
from qwen3_omni_neuron.prompt import Prompt


class CpuThinker:
    """Serves runtime.protocols.Thinker over model.thinker and the encoders."""

    def __init__(
        self,
        config: OmniConfig,
        thinker: Thinker,
        audio: CpuAudio,
        vision: CpuVision,
        slots: int,
        context_length: int,
        prompt_buckets: Sequence[int] = (),
    ):
        self.slots, self.context_length = slots, context_length
        self._config, self._thinker, self._audio, self._vision = config, thinker, audio, vision
        width, dtype = config.thinker.text.hidden_size, thinker.embedding.weight.dtype
        layers = len(config.thinker.vision.deepstack_layers)
        self._no_deepstack = torch.zeros(layers, 0, width, dtype=dtype)
        self._number = Numbers(config.thinker.text.vocab_size)
        self._slots = Slots(
            config.thinker.text,
            thinker,
            self._number(1),
            slots,
            context_length,
            dtype,
            prompt_buckets,
            (torch.zeros(0, dtype=torch.int64), self._no_deepstack),
        )

    @torch.inference_mode()
    def prefill(self, slot: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
        c, ids = self._config.thinker, prompt.token_ids
        rows = self._thinker.embedding(ids)
        if prompt.audio_mel:
            rows[ids == c.audio_token_id] = self._audio.encode(prompt.audio_mel)
        visual = (ids == c.image_token_id) | (ids == c.video_token_id)
        deepstack = self._no_deepstack
        if prompt.images or prompt.videos:
            deepstack = self._see(prompt, rows, visual)
        where = visual.nonzero().flatten()
        logits, accepted = self._slots.prefill(slot, rows, prompt.positions, where, deepstack)
        media = media_mask(ids, self._config)
        return logits, accepted[: len(ids)][media]

    @torch.inference_mode()
    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        if len(slots) == 1:
            return self._slots.step(slots, self._number(token_ids[0]))
        return self._slots.step(slots, torch.tensor(token_ids))

    def close(self) -> None:
        """Nothing to give back but memory, which goes with the engine."""

    def _see(self, prompt: Prompt, rows: Tensor, visual: Tensor) -> Tensor:
        """Put images and videos into their rows [S, hidden], in place. visual: bool [S], which
        those are. Returns what deepstack adds there, [layers, V, hidden]."""
        c, ids = self._config.thinker, prompt.token_ids[visual]
        seen = rows.new_empty(1 + len(c.vision.deepstack_layers), len(ids), rows.shape[1])
        for token_id, pictures in (
            (c.image_token_id, prompt.images),
            (c.video_token_id, prompt.videos),
        ):
            if pictures:
                seen[:, ids == token_id] = self._vision.encode(pictures)
        rows[visual] = seen[0]
        return seen[1:]
