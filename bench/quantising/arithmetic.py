"""Talker and code predictor in other arithmetic: the types of their sums and products.

The weights stay those of the checkpoint: bfloat16, which float32 holds exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.model.decoder import Decoder, DecoderLayer, Layout
from qwen3_omni_neuron.model.kv_cache import Appendable, Parts
from qwen3_omni_neuron.model.layers import FeedForward, RmsNorm, gated, linear
from qwen3_omni_neuron.model.rotary import Rotation

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Arithmetic:
    """Types in which a decoder computes.

    products: of attention, gate and up, experts and heads. residual: of the sum that layers add to.
    inner: of act(gate) * up and the down projection of a feed-forward without experts. rows: of the
    keys and values of its KV cache.
    """

    name: str
    products: torch.dtype = FLOAT32
    residual: torch.dtype = FLOAT32
    inner: torch.dtype = FLOAT32
    rows: torch.dtype = FLOAT32


WIDE = Arithmetic("float32")
RELEASED = Arithmetic("bfloat16", BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16)
PREDICTOR: Sequence[Arithmetic] = (
    WIDE,
    RELEASED,
    Arithmetic("bfloat16, residual float32", BFLOAT16, rows=BFLOAT16, inner=BFLOAT16),
    Arithmetic("bfloat16, residual, act * up and down float32", BFLOAT16, rows=BFLOAT16),
    Arithmetic("float32, KV rows bfloat16", rows=BFLOAT16),
    Arithmetic("float16", FLOAT16, FLOAT16, FLOAT16, FLOAT16),
    Arithmetic("float16, residual, act * up and down float32", FLOAT16, rows=FLOAT16),
)
"""Of the code predictor; float16 is there to compare with what was published of it."""
TALKER: Sequence[Arithmetic] = (
    WIDE,
    RELEASED,
    Arithmetic("bfloat16, residual float32", BFLOAT16, rows=BFLOAT16),
    Arithmetic("float32, KV rows bfloat16", rows=BFLOAT16),
)
"""Of the talker."""


class _Layer(nn.Module):
    """A decoder layer in an Arithmetic, over the parameters of a plain one."""

    def __init__(self, layer: DecoderLayer, a: Arithmetic):
        super().__init__()
        self._layer, self._a = [layer], a  # in a list: its parameters are the plain decoder's

    def forward(
        self, x: Tensor, rotation: Rotation, layout: Layout, cache: Appendable, layer: int
    ) -> Tensor:
        """Apply the layer; see DecoderLayer.forward."""
        (own,), a = self._layer, self._a
        x = x.to(a.residual)
        given = own.attention_norm(x).to(a.products)
        rounded = _RoundedRows(cache, a.rows)
        x = x + own.attention(given, rotation, layout, rounded, layer).to(a.residual)
        given = own.ffn_norm(x).to(a.products)
        if not isinstance(own.ffn, FeedForward):
            return x + own.ffn(given).to(a.residual)
        inner = gated(linear(given, own.ffn.gate_up.weight).to(a.inner))
        return x + linear(inner, own.ffn.down.weight).to(a.residual)


class _RoundedRows:
    """A KV cache that rounds what is appended; see model.kv_cache.Appendable."""

    def __init__(self, cache: Appendable, rows: torch.dtype):
        self._cache, self._rows, self.mask = cache, rows, cache.mask

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Parts:
        kept = (t.to(self._rows).to(t.dtype) for t in (keys, values))
        return self._cache.append(layer, *kept)


class _LastNorm(RmsNorm):
    """The norm before a head, which returns the type of the products."""

    products = FLOAT32

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.products)


def compute_in(decoder: Decoder, a: Arithmetic) -> None:
    """Let a decoder with weights in the type of `a.products` compute so."""
    layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    norm = _LastNorm(*decoder.norm.weight.shape, eps=decoder.norm.eps)
    norm.weight, norm.products = decoder.norm.weight, a.products
    decoder.norm, decoder.layers = norm, nn.ModuleList(_Layer(layer, a) for layer in layers)
