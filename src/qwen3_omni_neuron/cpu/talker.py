"""The talker with its code predictor on the CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.cpu.graph import trace_graph
from qwen3_omni_neuron.cpu.slots import DecoderSlots, Numbers
from qwen3_omni_neuron.errors import PromptTooLongError
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.sampler import top_p_limits
from qwen3_omni_neuron.model.talker_prompt import (
    ResizeMlp,
    codec_prefix_ids,
    media_mask,
    text_prefix_ids,
)
from qwen3_omni_neuron.prompt import TalkerPrompt
from qwen3_omni_neuron.runtime.protocols import PredictorSampling

DEFAULT_TOP_K = 50
GREEDY = None  # in the place of a top_k


@dataclass(frozen=True)
class _Awaited:
    """A talker prompt that lacks what the thinker makes of the media.

    rows: [rows, hidden], the media ones not filled yet, and the last one missing. media: bool
    [rows], which those are. positions: float32 [3, rows + 1].
    """

    rows: Tensor
    media: Tensor
    positions: Tensor


class CpuTalker:
    """Serves runtime.protocols.Talker over a decoder's slots, model.code_predictor and the
    projections.

    decoder: takes rows, gives logits and post-norm hidden states. codec_rows: the codec's table
    [codec vocab, hidden]. text_rows: [vocab, hidden], see text_rows. newline_id: the token of the
    line break after a role.
    """

    def __init__(
        self,
        config: OmniConfig,
        decoder: DecoderSlots,
        codec_rows: Tensor,
        predictor: CodePredictor,
        text_rows: Tensor,
        hidden_projection: ResizeMlp,
        newline_id: int,
    ):
        assert config.talker is not None
        self._groups, self._codec_bos = config.talker.code_groups, config.talker.codec_bos_id
        self.slots, self.context_length = decoder.slots, decoder.context_length
        self._config, self._decoder, self._predictor = config, decoder, predictor
        self._codec_rows, self._text_rows = codec_rows, text_rows
        self._hidden_projection = hidden_projection
        self._text_prefix = torch.tensor(text_prefix_ids(config, newline_id))
        self._number = Numbers(config.talker.text.vocab_size)
        self._awaited: dict[int, _Awaited] = {}
        row = codec_rows[:1]
        # Of the last step: the code predictor starts from it.
        self._hidden = [row] * self.slots
        # Of the last frame: the next step starts from it.
        self._feedback = [row] * self.slots
        self._by_top_k: dict[int | None, Callable[..., tuple[Tensor, Tensor]]] = {}
        for top_k in (GREEDY, DEFAULT_TOP_K):  # now, rather than on the path of a first frame
            self._predict_graph(top_k)

    @torch.inference_mode()
    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int) -> int:
        if len(prompt) >= self.context_length:
            raise PromptTooLongError(
                f"the talker's prompt has {len(prompt)} rows and its KV cache "
                f"{self.context_length} positions. Shorten the conversation."
            )
        assistant = self._text_rows[self._text_prefix]
        assistant[3:] += self._codec_prefix(speaker_id)[:-1]
        rows = torch.cat((self._text_rows[prompt.token_ids], assistant))
        media = media_mask(prompt.token_ids, self._config)
        if media.any():
            mask = F.pad(media, (0, len(assistant)))
            self._awaited[slot] = _Awaited(rows, mask, prompt.positions)
        else:
            self._awaited.pop(slot, None)
            self._fill(slot, rows, prompt.positions[:, :-1])
        return len(prompt)

    @torch.inference_mode()
    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        codec_bos = self._codec_rows[self._codec_bos]
        last = self._text_rows[first_token : first_token + 1] + codec_bos
        awaited = self._awaited.pop(slot, None)
        if awaited is None:
            return self._advance((slot,), last)
        rows = awaited.rows.masked_scatter(
            awaited.media[:, None], self._hidden_projection(accepted)
        )
        return self._fill(slot, torch.cat((rows, last)), awaited.positions)

    @torch.inference_mode()
    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        if len(slots) == 1:
            codes, self._feedback[slots[0]] = self._predict_alike(slots, code0, sampling)
            return codes
        codes = torch.empty((len(slots), self._groups), dtype=torch.int64)
        by_graph: dict[int | None, list[int]] = {}
        for index, how in enumerate(sampling):
            by_graph.setdefault(_graph_key(how), []).append(index)
        for indices in by_graph.values():
            alike = [slots[i] for i in indices]
            codes[indices], feedback = self._predict_alike(
                alike, [code0[i] for i in indices], [sampling[i] for i in indices]
            )
            for slot, row in zip(alike, feedback.split(1), strict=True):
                self._feedback[slot] = row
        return codes

    @torch.inference_mode()
    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        if len(slots) == 1:
            token = token_ids[0]
            return self._advance(slots, self._feedback[slots[0]] + self._text_rows[token])
        feedback = torch.cat([self._feedback[slot] for slot in slots])
        return self._advance(slots, feedback + self._text_rows[list(token_ids)])

    def close(self) -> None:
        """Nothing to give back but memory, which goes with the engine."""

    def _fill(self, slot: int, rows: Tensor, positions: Tensor) -> Tensor:
        """Prefill a slot. Returns the last row's logits [1, vocab]."""
        logits, self._hidden[slot] = self._decoder.prefill(slot, rows, positions)
        return logits

    def _advance(self, slots: Sequence[int], rows: Tensor) -> Tensor:
        """Append one row a slot. Returns logits [len(slots), vocab]."""
        logits, hidden = self._decoder.step(slots, rows)
        for slot, row in zip(slots, hidden.split(1), strict=True):
            self._hidden[slot] = row
        return logits

    def _predict_alike(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        """One graph for slots that sample alike. Returns codes [n, 16] and feedback [n, hidden]."""
        if len(slots) == 1:
            hidden, code = self._hidden[slots[0]], self._number(code0[0])
        else:
            hidden, code = torch.cat([self._hidden[s] for s in slots]), torch.tensor(code0)
        graph = self._predict_graph(_graph_key(sampling[0]))
        if sampling[0].uniforms is None:
            return graph(hidden, code)
        uniforms = torch.from_numpy(
            np.stack([how.uniforms for how in sampling if how.uniforms is not None])
        )
        return graph(hidden, code, uniforms, top_p_limits([how.top_p for how in sampling]))

    def _predict_graph(self, top_k: int | None) -> Callable[..., tuple[Tensor, Tensor]]:
        """The code predictor's graph for one top_k, which is a shape inside it, or for greedy."""
        if top_k not in self._by_top_k:
            # Two slots, so that the number of slots is no constant in the graph.
            example = [self._codec_rows[:2], torch.tensor([0, 1])]
            function: Callable[..., tuple[Tensor, Tensor]] = self._predictor
            if top_k is not GREEDY:
                example += [torch.zeros(2, self._groups - 1), torch.tensor([0.8, 0.8])]
                function = partial(self._predictor, top_k=top_k)
            self._by_top_k[top_k] = trace_graph(self._predictor, function, *example)
        return self._by_top_k[top_k]

    def _codec_prefix(self, speaker_id: int) -> Tensor:
        """Codec sides of the assistant rows 3 to 8."""
        assert self._config.talker is not None
        ids = codec_prefix_ids(self._config.talker, speaker_id)
        return self._codec_rows[torch.tensor(ids)]


def _graph_key(sampling: PredictorSampling) -> int | None:
    return GREEDY if sampling.uniforms is None else sampling.top_k
