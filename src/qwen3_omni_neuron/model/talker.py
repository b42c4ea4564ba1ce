"""Talker: text rows and codec feedback in, logits of code 0 out."""

from torch import Tensor, nn

from qwen3_omni_neuron.model.config import TalkerConfig
from qwen3_omni_neuron.model.decoder import DECODE, PROMPT, Decoder
from qwen3_omni_neuron.model.kv_cache import Appendable
from qwen3_omni_neuron.model.layers import Linear
from qwen3_omni_neuron.model.rotary import Rotary


class Talker(nn.Module):
    """Decoder of 20 MoE layers (released) with the gated shared expert.

    Source: transformers Qwen3OmniMoeTalkerForConditionalGeneration.forward.
    """

    def __init__(self, c: TalkerConfig):
        super().__init__()
        text = c.text
        self.codec_embedding = nn.Embedding(text.vocab_size, text.hidden_size)
        self.decoder = Decoder(text)
        self.rotary = Rotary(text.rope, text.head_dim)
        self.codec_head = Linear(text.hidden_size, text.vocab_size)

    def prefill(
        self, rows: Tensor, positions: Tensor, last: Tensor, cache: Appendable
    ) -> tuple[Tensor, Tensor]:
        """Run one talker prompt from position 0 of an empty cache slot.

        rows: [S, hidden]; positions: float32 [3, S]; last: int64 [1], index of the prompt's last
        row, after which rows are padding; cache: of one slot. Returns codec logits [1, vocab] and
        the post-norm hidden state [1, hidden] of the last row: the code predictor's first input.
        """
        rotation = self.rotary.at_axes(positions)
        x, _ = self.decoder(rows, rotation, cache, PROMPT)
        hidden = self.decoder.norm(x.index_select(0, last))
        return self.codec_head(hidden), hidden

    def decode(self, rows: Tensor, positions: Tensor, cache: Appendable) -> tuple[Tensor, Tensor]:
        """Run one frame a slot.

        rows: [slots, hidden], codec feedback plus text row; positions: float32 [slots]. Returns
        codec logits [slots, vocab] and post-norm hidden states [slots, hidden].
        """
        x, _ = self.decoder(rows, self.rotary.at(positions), cache, DECODE)
        hidden = self.decoder.norm(x)
        return self.codec_head(hidden), hidden
