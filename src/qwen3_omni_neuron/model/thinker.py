"""Text decoder of the thinker: tokens and encoded media in, text logits out."""

from torch import Tensor, nn

from qwen3_omni_neuron.model.config import ThinkerConfig
from qwen3_omni_neuron.model.decoder import DECODE, PROMPT, Decoder
from qwen3_omni_neuron.model.kv_cache import Appendable
from qwen3_omni_neuron.model.rotary import Rotary


class ThinkerModel(nn.Module):
    """Decoder of 48 MoE layers (released) with multi-axis rotary embedding.

    accept_layer: index into the reference's hidden_states, the talker's input at media positions.
    Source: transformers Qwen3OmniMoeThinkerForConditionalGeneration.forward.
    """

    def __init__(self, c: ThinkerConfig, accept_layer: int):
        super().__init__()
        text = c.text
        self.accept_layer = accept_layer
        self.embedding = nn.Embedding(text.vocab_size, text.hidden_size)
        self.decoder = Decoder(text)
        self.rotary = Rotary(text.rope, text.head_dim)
        self.head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

    def prefill(
        self,
        rows: Tensor,
        positions: Tensor,
        last: Tensor,
        cache: Appendable,
        deepstack: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one prompt, or its rows after the cached ones.

        rows: [S, hidden], token embeddings, with encoded media at media positions; positions:
        float32 [3, S]; last: int64 [1], index of the last row before padding; cache: one slot's;
        deepstack: [layers, S, hidden], added by the first layers to rows of images and video; zeros
        elsewhere. Returns logits [1, vocab] of the last row and the accept layer's hidden states
        [S, hidden].
        """
        rotation = self.rotary.at_axes(positions)
        x, accepted = self.decoder(rows, rotation, cache, PROMPT, self.accept_layer, deepstack)
        return self.head(self.decoder.norm(x.index_select(0, last))), accepted

    def decode(self, token_ids: Tensor, positions: Tensor, cache: Appendable) -> Tensor:
        """Run one generated token a slot.

        token_ids: int64 [slots]; positions: float32 [slots], rope's. Returns logits [slots, vocab].
        """
        x, _ = self.decoder(self.embedding(token_ids), self.rotary.at(positions), cache, DECODE)
        return self.head(self.decoder.norm(x))
