"""Layers that several models share: RMSNorm, linear and gated feed-forward.

Linear layers have no bias and take rows [rows, features]. `add_to` adds a layer's output to a
residual in the layer's last operation.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it is float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`, without any operation where it is already."""
    return x if x.dtype == dtype else x.to(dtype)


class RmsNorm(nn.Module):
    """Root mean square norm: x / rms(x) in float32, cast back, times the weight.

    The cast comes before the weight as in the reference: fusing the two, or staying in bfloat16,
    drifts over the code predictor's 15 steps and the talker's feedback loop. The norm is over the
    last axis of `shape`; a longer shape has one weight vector a head.
    spelled_out: True for a graph that XLA lowers, which has no hypot.
    Source: transformers Qwen3OmniMoeRMSNorm.forward.
    """

    zero: Tensor
    floor: Tensor

    def __init__(self, *shape: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.spelled_out = False
        self.root = math.sqrt(shape[-1])
        # rms(x) = sqrt(|x|^2 / width + eps) = hypot(|x|, sqrt(width * eps)) / sqrt(width), which
        # is two operations instead of three on the path of every token.
        floor = torch.tensor(self.root * math.sqrt(eps), dtype=torch.float32, device="cpu")
        self.register_buffer("floor", floor, persistent=False)
        self.register_buffer("zero", torch.zeros((), device="cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., *shape]; the result has the same shape and dtype."""
        wide = widen(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        if self.spelled_out:
            rms = torch.sqrt(torch.square(norm) + torch.square(self.floor))
        else:
            rms = torch.hypot(norm, self.floor)
        zero = cast(self.zero, wide.dtype)
        unit = torch.addcdiv(zero, wide, rms, value=self.root)
        return cast(unit, x.dtype) * self.weight


class Linear(nn.Module):
    """Product x @ weight.T without a bias.

    x is [rows, in], not [..., in] as for nn.Linear: a decode step is dozens of these products on
    one row each, where the reshaping around a product costs more than the product.
    """

    def __init__(self, into: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [rows, in] to [rows, out]."""
        return torch.mm(x, self.weight.t())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + forward(x), in one operation. residual: [rows, out]."""
        return torch.addmm(residual, x, self.weight.t())


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [rows, width]. gate_up: [rows, 2 width], gate first."""
    width = int(gate_up.shape[-1]) // 2
    gate, up = gate_up.split([width, width], -1)
    return F.silu(gate) * up


class FeedForward(nn.Module):
    """Feed-forward down(silu(gate(x)) * up(x)), with gate and up in one matrix.

    Source: transformers Qwen3OmniMoeMLP.forward.
    """

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * width)
        self.down = Linear(width, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [rows, hidden] to the same shape."""
        return self.down(gated(self.gate_up(x)))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + forward(x), both [rows, hidden]."""
        return self.down.add_to(residual, gated(self.gate_up(x)))
