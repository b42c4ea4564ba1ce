"""Decoder stack of the thinker, the talker and the code predictor.

Hidden states are rows [slots * span, hidden], slot by slot: a prompt's `span` positions in one
slot, or one new position in each of several. A `Layout` fixes one of these; the other follows from
the number of rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.kv_cache import Appendable, FrameCache, Parts
from qwen3_omni_neuron.model.layers import FeedForward, Linear, RmsNorm, cut, widen
from qwen3_omni_neuron.model.moe import MoeFeedForward
from qwen3_omni_neuron.model.rotary import Rotation, apply_rotary

Layout = tuple[int, int]
"""Slots and span of a decoder's rows; -1 for the other one."""

PROMPT: Layout = (1, -1)
DECODE: Layout = (-1, 1)


class Attention(nn.Module):
    """Grouped-query attention with q/k RMSNorm per head and rotary positions.

    Source: transformers Qwen3OmniMoeThinkerTextAttention.forward.
    """

    def __init__(self, c: DecoderConfig):
        super().__init__()
        self.scale = c.head_dim**-0.5
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        width = (c.heads + 2 * c.kv_heads) * c.head_dim
        self.qkv = Linear(c.hidden_size, width, bias=False)
        self.out = Linear(c.heads * c.head_dim, c.hidden_size, bias=False)
        self.qk_norm = RmsNorm(c.heads + c.kv_heads, c.head_dim, eps=c.norm_eps)

    def forward(
        self, x: Tensor, rotation: Rotation, layout: Layout, cache: Appendable, layer: int
    ) -> Tensor:
        """Let each row of x [slots * span, hidden] attend to its slot. layer: index in cache."""
        qkv = self.qkv(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        qk, v = cut(qkv, 1, self.heads + self.kv_heads)
        qk = apply_rotary(widen(self.qk_norm(qk)), rotation).to(x.dtype)
        q, k = cut(qk, 1, self.heads)
        # [slots * span, heads, head_dim] -> [slots, heads, span, head_dim]
        q, k, v = (t.unflatten(0, layout).transpose(1, 2) for t in (q, k, v))
        parts = cache.append(layer, k, v)
        if isinstance(cache, FrameCache) and cache.by_sums:
            mixed = self._by_sums(q, *parts[0])
        elif layout == DECODE or len(parts) > 1:
            mixed = self._by_products(q, parts, cache.mask)
        else:
            mixed = self._prompt(q, *parts[0], cache.mask)
        return self.out(mixed.transpose(1, 2).flatten(2).flatten(0, 1))

    def _prompt(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=None if mask is None else mask.logical_not(),
            is_causal=mask is None,
            enable_gqa=True,
        )

    def _by_products(self, q: Tensor, parts: Parts, mask: Tensor | None) -> Tensor:
        """Attend by plain products, q [slots, heads, span, head_dim], to the same shape.

        Query heads that share a KV head are rows of one product, so that no keys are repeated. The
        softmax is in float32 over all parts, uncopied.
        """
        group, span = self.heads // self.kv_heads, q.shape[2]
        q = q.unflatten(1, (self.kv_heads, group)).flatten(2, 3)
        each = [widen(q @ keys.transpose(2, 3)) for keys, _ in parts]
        scores = (each[0] if len(each) == 1 else torch.cat(each, -1)) * self.scale
        if mask is not None:
            by_head = scores.unflatten(2, (group, span))
            scores = by_head.masked_fill(mask.unsqueeze(1), float("-inf")).flatten(2, 3)
        weights = torch.softmax(scores, -1).to(parts[0][1].dtype)
        products, begin = list[Tensor](), 0
        for _, values in parts:
            end = begin + values.shape[2]
            products.append(weights[..., begin:end] @ values)
            begin = end
        mixed = sum(products[1:], products[0])
        return mixed.unflatten(2, (group, span)).flatten(1, 2)

    def _by_sums(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend without a matrix product, q [slots, heads, span, head_dim], to the same shape.

        A row sees the keys up to its own. Rounds where `_by_products` does.
        """
        group, span, positions = self.heads // self.kv_heads, q.shape[2], keys.shape[2]
        rows = q.unflatten(1, (self.kv_heads, group)).flatten(2, 3).unsqueeze(3)
        # [slots, kv_heads, group * span, positions, head_dim] -> [slots, kv_heads, ..., positions]
        scores = (widen(rows) * widen(keys).unsqueeze(2)).sum(-1).to(q.dtype)
        later = torch.ones(span, positions, dtype=torch.bool, device=q.device)
        later = later.triu(positions - span + 1).repeat(group, 1)
        scores = (widen(scores) * self.scale).masked_fill(later, float("-inf"))
        weights = torch.softmax(scores, -1).to(values.dtype)
        mixed = (widen(weights).unsqueeze(4) * widen(values).unsqueeze(2)).sum(3).to(q.dtype)
        return mixed.unflatten(2, (group, span)).flatten(1, 2)


class DecoderLayer(nn.Module):
    """Attention, then feed-forward, each after a norm and with a residual."""

    def __init__(self, c: DecoderConfig):
        super().__init__()
        self.attention_norm = RmsNorm(c.hidden_size, eps=c.norm_eps)
        self.attention = Attention(c)
        self.ffn_norm = RmsNorm(c.hidden_size, eps=c.norm_eps)
        self.ffn: FeedForward | MoeFeedForward
        if c.moe is None:
            self.ffn = FeedForward(c.hidden_size, c.ffn_width)
        else:
            self.ffn = MoeFeedForward(c.hidden_size, c.moe)

    def forward(
        self, x: Tensor, rotation: Rotation, layout: Layout, cache: Appendable, layer: int
    ) -> Tensor:
        """Apply the layer to x [slots * span, hidden]; see Attention.forward."""
        x = x + self.attention(self.attention_norm(x), rotation, layout, cache, layer)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """Decoder layers, and the last norm, which callers apply to rows that they need."""

    def __init__(self, c: DecoderConfig):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.layers))
        self.norm = RmsNorm(c.hidden_size, eps=c.norm_eps)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: Appendable,
        layout: Layout,
        accept_layer: int = 0,
        deepstack: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layers over x [slots * span, hidden].

        deepstack: [layers, slots * span, hidden], added to the rows after each of the first layers;
        zeros except for images and video. Returns the hidden states after the last layer, before
        the norm, and the reference's hidden_states[accept_layer], of which x is the first.
        """
        accepted = x
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, layout, cache, index)
            if index + 1 == accept_layer:
                accepted = x  # as in the reference, before deepstack
            if deepstack is not None and index < len(deepstack):
                x = x + deepstack[index]
        return x, accepted
