"""Code predictor: computes the other 15 codes of a talker step's frame, in one graph.

Its sampling has static shapes, too, and noise as an input.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import TalkerConfig
from qwen3_omni_neuron.model.decoder import DECODE, Decoder
from qwen3_omni_neuron.model.kv_cache import FrameCache
from qwen3_omni_neuron.model.layers import linear
from qwen3_omni_neuron.model.rotary import RotaryTable


def sample_top(
    logits: Tensor,
    noise: Tensor,
    top_k: int,
    top_p: Tensor,
    limits: Tensor | None = None,
    by_sums: bool = False,
) -> Tensor:
    """Draw one id a row from the top-k, then top-p, part of softmax(logits).

    It has the largest, or first largest, sum of logit and noise. logits: [rows, vocab]; noise:
    float32 [rows, vocab], see engines.noise; top_p: float32 [rows], see `top_p_limits`; limits:
    integers [rows], each row's top-k, 1 to `top_k`; None: `top_k` for all; by_sums: for Neuron,
    which has no running sum of floats; the last bit may then differ. Returns integers [rows]. The
    candidates are those of transformers' TopKLogitsWarper and TopPLogitsWarper; equal logits at the
    edge of top-p stay together.
    """
    logits = logits.float()
    k = min(top_k, logits.shape[-1]) if top_k > 0 else logits.shape[-1]
    values = logits.topk(k).values
    most, least = values[:, :1], values[:, -1:]
    if limits is not None:
        # A comparison and a sum: devices gather along the last axis number by number.
        places = torch.arange(k, dtype=limits.dtype, device=logits.device)
        least = torch.where(places == limits[:, None] - 1, values, 0).sum(-1, keepdim=True)
    # Over the vocabulary: more than k ids stay if logits equal the k-th.
    total = torch.where(logits >= least, (logits - most).exp(), 0).sum(-1, keepdim=True)
    probabilities = (values - most).exp() / total
    if by_sums:
        earlier = torch.ones(k, k, dtype=torch.bool, device=logits.device).triu()
        running = torch.where(earlier, probabilities.unsqueeze(2), 0).sum(1)
    else:
        running = probabilities.cumsum(-1)
    # An id is dropped if likelier ones together reach top_p. Neuron lowers amax, not amin.
    likelier = running - probabilities
    nucleus = -torch.where(likelier < top_p[:, None], -values, -most).amax(-1, keepdim=True)
    kept = logits >= torch.maximum(least, nucleus)
    return torch.where(kept, logits - most + noise, float("-inf")).argmax(-1)


def top_p_limits(top_p: Sequence[float]) -> Tensor:
    """Return the top_p of several rows as sample_top takes it, float32 [rows].

    1 becomes infinity, which keeps all ids even if rounding lifts their sum above 1.
    """
    return torch.tensor([limit if limit < 1 else float("inf") for limit in top_p])


class CodePredictor(nn.Module):
    """Decoder of fifteen unrolled steps, including their KV cache.

    The first step reads two rows: the talker's post-norm hidden state at code 0, then code 0's
    embedding. Step g reads codec_embedding[g - 1] of code g and writes code g + 1 through head[g].
    It computes in the hidden state's type: bfloat16 weights in float32 give float32's codes.
    Source: transformers Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration.forward and
    Qwen3OmniMoeTalkerForConditionalGeneration.prepare_inputs_for_generation.
    """

    def __init__(self, c: TalkerConfig, codec_embedding: nn.Embedding):
        """Lay out the parameters. codec_embedding: the talker's own table, for code 0."""
        super().__init__()
        p, self.steps = c.predictor, c.code_groups - 1
        self.decoder = Decoder(p)
        self.rotary = RotaryTable(p.rope, p.head_dim, c.code_groups)
        self.embedding = nn.Parameter(torch.empty(self.steps, p.vocab_size, p.hidden_size))
        self.head = nn.Parameter(torch.empty(self.steps, p.vocab_size, p.hidden_size))
        self.code0_embedding = codec_embedding
        self.project: Callable[[Tensor, Tensor], Tensor] = linear
        """Product of rows with a head, as layers.linear unless heads are [in, out]."""

    def forward(
        self,
        hidden: Tensor,
        code0: Tensor,
        noise: Tensor | None = None,
        top_p: Tensor | None = None,
        top_k: int = 50,
        top_k_limits: Tensor | None = None,
        by_sums: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Predict codes 1 to 15 of one frame a slot.

        hidden: [slots, hidden], in the type of the arithmetic; code0: int64 [slots];
        noise: float32 [slots, 15, vocab], see engines.noise, or None for greedy; top_p: float32
        [slots], see top_p_limits; top_k, top_k_limits (int64 [slots]): see sample_top; by_sums:
        attend and choose without matrix products, for Neuron, where each waits for the last.
        Returns codes int64 [slots, 16], code 0 first, -1 where the logits have NaN or +inf; and the
        feedback [slots, hidden]: the sum of the codes' embeddings, in their type.
        """
        row = self.code0_embedding(code0)
        codes, embedded, seen = list[Tensor](), [row], list[Tensor]()
        cache = FrameCache(by_sums)
        rows = torch.stack((hidden, row.to(hidden.dtype)), 1).flatten(0, 1)  # [slots * 2, hidden]
        # One table, whose rows a device gathers; it might first copy a part of one.
        table, vocabulary = self.embedding.flatten(0, 1), self.embedding.shape[1]
        for step in range(self.steps):
            logits = self._logits(rows.to(hidden.dtype), step, cache)
            if noise is None or top_p is None:
                code = logits.argmax(-1)
            else:
                of_step = noise[:, step]
                code = sample_top(logits, of_step, top_k, top_p, top_k_limits, by_sums)
            seen.append(logits)
            code = code.to(code0.dtype)
            rows = F.embedding(code + step * vocabulary, table)
            codes.append(code)
            embedded.append(rows)
        # [slots, 15]; NaN is not below infinity. A Python number would be compared in float64.
        infinity = torch.full((), torch.inf, dtype=seen[0].dtype, device=row.device)
        not_finite = (torch.stack(seen, 1) < infinity).logical_not().any(-1)
        sampled = torch.where(not_finite, -1, torch.stack(codes, 1))
        # One sum that rounds once, as the reference's, also in bfloat16.
        return torch.cat((code0[:, None], sampled), 1), torch.stack(embedded, 1).sum(1)

    def _logits(self, rows: Tensor, step: int, cache: FrameCache) -> Tensor:
        """Run one step; return the logits [slots, vocab] after each slot's last row.

        rows: two a slot at step 0 (positions 0 and 1), one at the others (position step + 1).
        """
        if step == 0:
            cos, sin = self.rotary.span(0, 2)
            slots = rows.shape[0] // 2
            rotation = cos.repeat(slots, 1, 1), sin.repeat(slots, 1, 1)
            x = self.decoder(rows, rotation, cache, (-1, 2))[0][1::2]
        else:
            rotation = self.rotary.span(step + 1, step + 2)
            x, _ = self.decoder(rows, rotation, cache, DECODE)
        return self.project(self.decoder.norm(x), self.head[step])
