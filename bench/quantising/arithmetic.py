"""The code predictor in other arithmetic: which of its sums and products are in which type."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.decoder import DecoderLayer, Layout
from qwen3_omni_neuron.model.kv_cache import Appendable
from qwen3_omni_neuron.model.layers import gated
from qwen3_omni_neuron.model.rotary import Rotation


@dataclass(frozen=True)
class Arithmetic:
    """Types in which a decoder computes.

    products: of attention, gate and up, and the heads. residual: of the sums that layers add to.
    inner: of act(gate) * up and the down projection. rows: of keys and values.
    """

    name: str
    products: torch.dtype
    residual: torch.dtype
    inner: torch.dtype

    @property
    def released(self) -> bool:
        """Whether all is in one type, as in model/."""
        return self.products == self.residual == self.inner


class ArithmeticLayer(nn.Module):
    """A decoder layer in an Arithmetic, over the parameters of a plain one."""

    def __init__(self, layer: DecoderLayer, a: Arithmetic):
        super().__init__()
        self._layer, self._a = layer, a

    def forward(
        self, x: Tensor, rotation: Rotation, layout: Layout, cache: Appendable, layer: int
    ) -> Tensor:
        """Apply the layer; see DecoderLayer.forward. x: of type `residual` after layer 0."""
        own, a = self._layer, self._a
        x = x.to(a.residual)
        given = own.attention_norm(x).to(a.products)
        x = x + own.attention(given, rotation, layout, cache, layer).to(a.residual)
        inner = gated(own.ffn.gate_up(own.ffn_norm(x).to(a.products)).to(a.inner))
        return x + F.linear(inner, own.ffn.down.weight.to(a.inner)).to(a.residual)


class LastNorm(nn.Module):
    """The norm before the heads, whose result is of the products' type."""

    def __init__(self, norm: nn.Module, a: Arithmetic):
        super().__init__()
        self._norm, self._a = norm, a

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden]."""
        out: Tensor = self._norm(x)
        return out.to(self._a.products)


def compute_in(predictor: CodePredictor, a: Arithmetic) -> CodePredictor:
    """Let a code predictor with float32 or bfloat16 parameters compute so; returns it."""
    for parameter in predictor.parameters():
        parameter.data = parameter.data.to(a.products)
    decoder = predictor.decoder
    decoder.layers = nn.ModuleList(ArithmeticLayer(layer, a) for layer in decoder.layers)
    decoder.norm = LastNorm(decoder.norm, a)
    return predictor
