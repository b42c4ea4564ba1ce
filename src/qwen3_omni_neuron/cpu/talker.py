"""The talker with its code predictor on the CPU."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.cpu.graph import trace_graph
from qwen3_omni_neuron.cpu.slots import Numbers, Slots
from qwen3_omni_neuron.cpu.text_rows import TextRows
from qwen3_omni_neuron.errors import PromptTooLongError
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.talker_prompt import (
    ResizeMlp,
    codec_prefix_ids,
    media_mask,
    text_prefix_ids,
    user_positions,
)
from qwen3_omni_neuron.positions import rope_positions
from qwen3_omni_neuron.prompt import Prompt
from qwen3_omni_neuron.runtime.protocols import PredictorSampling, TalkerOutput

DEFAULT_TOP_K = 50


class CpuTalker:
    """Serves runtime.protocols.Talker over model.talker, model.code_predictor and the projections.

    newline_id: the token of the line break after a role.
    """

    def __init__(
        self,
        config: OmniConfig,
        talker: Talker,
        predictor: CodePredictor,
        text_rows: TextRows,
        hidden_projection: ResizeMlp,
        newline_id: int,
        slots: int,
        context_length: int,
    ):
        assert config.talker is not None
        self._groups, self._codec_bos = config.talker.code_groups, config.talker.codec_bos_id
        self.context_length = context_length
        self._config, self._talker, self._predictor = config, talker, predictor
        self._text_rows, self._hidden_projection = text_rows, hidden_projection
        self._text_prefix = torch.tensor(text_prefix_ids(config, newline_id))
        self._dtype = talker.codec_head.weight.dtype
        self._number = Numbers(config.talker.text.vocab_size)
        row = talker.codec_embedding.weight[:1]
        self._slots = Slots(
            config.talker.text, talker, talker.decode, row, slots, context_length, self._dtype
        )
        self._greedy = trace_graph(predictor, predictor, row, self._number(1))
        self._by_top_k: dict[int, Callable[..., tuple[Tensor, Tensor]]] = {}
        self._sampled(DEFAULT_TOP_K)  # now, rather than on the path of somebody's first frame

    @torch.inference_mode()
    def text_row(self, token_id: int) -> Tensor:
        return self._text_rows(torch.tensor([token_id]))

    @torch.inference_mode()
    def prompt_rows(self, prompt: Prompt, accepted: Tensor, speaker_id: int) -> Tensor:
        user = user_positions(prompt.token_ids, self._config)
        ids = prompt.token_ids[user]
        media = media_mask(ids, self._config)
        rows = torch.empty(len(ids), self._talker.codec_embedding.embedding_dim, dtype=self._dtype)
        rows[~media] = self._text_rows(ids[~media])
        rows[media] = self._hidden_projection(accepted[user[media]])
        assistant = self._text_rows(self._text_prefix)
        assistant[3:] += self._codec_rows(speaker_id)[:-1]
        return torch.cat((rows, assistant))

    @torch.inference_mode()
    def prefill(self, slot: int, rows: Tensor, first_token: int) -> TalkerOutput:
        first = self.text_row(first_token) + self._talker.codec_embedding.weight[self._codec_bos]
        rows = torch.cat((rows, first))
        if len(rows) >= self.context_length:
            raise PromptTooLongError(
                f"the talker's prompt has {len(rows)} rows and its KV cache {self.context_length} "
                "positions. Shorten the conversation."
            )
        positions = rope_positions(len(rows))
        logits, hidden = self._talker.prefill(rows, positions, self._slots.line(slot))
        self._slots.filled(slot, positions)
        return TalkerOutput(logits, hidden)

    @torch.inference_mode()
    def step(self, slot: int, row: Tensor) -> TalkerOutput:
        return TalkerOutput(*self._slots.step(slot, row))

    @torch.inference_mode()
    def predict(
        self, hidden: Tensor, code0: int, sampling: PredictorSampling
    ) -> tuple[Tensor, Tensor]:
        code = self._number(code0)
        if sampling.uniforms is None:
            return self._greedy(hidden, code)
        uniforms = torch.from_numpy(sampling.uniforms)[None]
        return self._sampled(sampling.top_k)(hidden, code, uniforms, torch.tensor([sampling.top_p]))

    def _sampled(self, top_k: int) -> Callable[..., tuple[Tensor, Tensor]]:
        """The code predictor's graph for one top_k, which is a shape inside it."""
        if top_k not in self._by_top_k:
            row, uniforms = (
                self._talker.codec_embedding.weight[:1],
                torch.zeros(1, self._groups - 1),
            )
            self._by_top_k[top_k] = trace_graph(
                self._predictor,
                partial(self._predictor, top_k=top_k),
                row,
                self._number(1),
                uniforms,
                torch.tensor([0.8]),
            )
        return self._by_top_k[top_k]

    def _codec_rows(self, speaker_id: int) -> Tensor:
        """Codec sides of the assistant rows 3 to 8."""
        assert self._config.talker is not None
        ids = codec_prefix_ids(self._config.talker, speaker_id)
        return self._talker.codec_embedding(torch.tensor(ids))
