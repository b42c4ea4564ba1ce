"""Layers that several models share: RMSNorm and the gated feed-forward."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""An encoder's attention: (queries, keys, values, mask) -> result, [frames, heads, rows, head_dim].

mask: bool [frames or 1, 1, 1, rows], True for the keys that every query sees.
"""


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if float64."""
    return x if x.dtype == torch.float64 else x.float()


def cut(x: Tensor, axis: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the first `length` entries along an axis, and the rest.

    By slices: a compiler may gather the entries of torch's split as strided views.
    """
    return x.narrow(axis, 0, length), x.narrow(axis, length, x.shape[axis] - length)


class RmsNorm(nn.Module):
    """Root mean square norm: x / rms(x) in float32, cast back, times the weight.

    The cast precedes the weight as in the reference: else codes drift. The norm is over the last
    axis of `shape`; a longer shape has a weight vector per head.
    Source: transformers Qwen3OmniMoeRMSNorm.forward.
    """

    def __init__(self, *shape: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., *shape] to the same shape and dtype."""
        wide = widen(x)
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return unit.to(x.dtype) * self.weight


class Linear(nn.Linear):
    """nn.Linear that computes in its input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., into] to [..., out] of the same dtype."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [..., into] by a matrix [out, into] to [..., out], in x's dtype."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., width]. gate_up: [..., 2 width], gate first."""
    gate, up = cut(gate_up, -1, gate_up.shape[-1] // 2)
    return F.silu(gate) * up


class FeedForward(nn.Module):
    """Feed-forward down(silu(gate(x)) * up(x)), with gate and up in one matrix.

    Source: transformers Qwen3OmniMoeMLP.forward.
    """

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * width, bias=False)
        self.down = Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to the same shape."""
        return self.down(gated(self.gate_up(x)))
