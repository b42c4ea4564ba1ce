"""Code predictor: from one talker step to the other 15 codes of its frame, in one graph."""

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import TalkerConfig
from qwen3_omni_neuron.model.decoder import DECODE, Decoder
from qwen3_omni_neuron.model.kv_cache import FrameCache
from qwen3_omni_neuron.model.rotary import RotaryTable
from qwen3_omni_neuron.model.sampler import RunningSum, running_sum, sample_top


class CodePredictor(nn.Module):
    """Decoder of fifteen unrolled steps, with its KV cache inside.

    The first step reads two rows: the talker's post-norm hidden state of the step that gave code
    0, then the embedding of code 0. Step g reads codec_embedding[g - 1] of code g and writes
    code g + 1 through head[g].
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

    def forward(
        self,
        hidden: Tensor,
        code0: Tensor,
        uniforms: Tensor | None = None,
        top_p: Tensor | None = None,
        top_k: int = 50,
        running_sum: RunningSum = running_sum,
        top_k_limits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predict codes 1 to 15 of one frame a slot.

        hidden: [slots, hidden]; code0: int64 [slots]; uniforms: float32 [slots, 15] in [0, 1),
        the random numbers of the 15 draws, or None for greedy; top_p: float32 [slots], see
        model.sampler.top_p_limits; top_k, running_sum, top_k_limits (int64 [slots]): see
        model.sampler.sample_top.
        Returns codes int64 [slots, 16], code 0 first, and the feedback [slots, hidden]: the sum
        of the 16 codes' embeddings.
        """
        row = self.code0_embedding.weight.index_select(0, code0)
        codes, embedded = [code0], [row]
        cache = FrameCache()
        rows = torch.stack((hidden, row), 1).flatten(0, 1)  # [slots * 2, hidden]
        for step in range(self.steps):
            logits = self._logits(rows, step, cache)
            if uniforms is None or top_p is None:
                code = logits.argmax(-1)
            else:
                draws = uniforms[:, step]
                code = sample_top(logits, draws, top_k, top_p, running_sum, top_k_limits)
            rows = self.embedding[step].index_select(0, code)
            codes.append(code)
            embedded.append(rows)
        # One sum that rounds once, as the reference's does, also in bfloat16.
        return torch.stack(codes, 1), torch.stack(embedded, 1).sum(1)

    def teacher_forced_logits(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Return the logits of the 15 steps over given codes, [slots, 15, vocab].

        hidden: [slots, hidden]; codes: int64 [slots, 16].
        """
        row = self.code0_embedding.weight.index_select(0, codes[:, 0])
        cache = FrameCache()
        rows = torch.stack((hidden, row), 1).flatten(0, 1)
        logits = []
        for step in range(self.steps):
            logits.append(self._logits(rows, step, cache))
            rows = self.embedding[step].index_select(0, codes[:, step + 1])
        return torch.stack(logits, 1)

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
        return torch.mm(self.decoder.norm(x), self.head[step].t())
