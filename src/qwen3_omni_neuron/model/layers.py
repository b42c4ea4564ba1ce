"""RMSNorm in float32, whatever the model's own precision."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def widen(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is already there."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; no operation at all where it is already."""
    return x if x.dtype == dtype else x.to(dtype)


class RmsNorm(nn.Module):
    """x / rms(x) in float32, cast back, times the weight.

    The cast before the weight is the reference's: fusing the two, or staying in bfloat16, drifts
    over the code predictor's 15 steps and the talker's feedback loop. The norm is over the last
    of `shape`; a longer shape has a weight a head.
    Source: transformers Qwen3OmniMoeRMSNorm.forward.

    spelled_out: set for a graph that XLA lowers, which has no hypot.
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
        """x: [..., *shape]. Returns the same shape and dtype."""
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
    """x @ weight.T over rows, and the same added to a residual in one operation.

    Rows, not [..., in] as nn.Linear takes them: one decode step is dozens of these on one row
    each, where what surrounds the product costs more than the product.
    """

    def __init__(self, into: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, in] -> [rows, out]."""
        return torch.mm(x, self.weight.t())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x). residual: [rows, out]."""
        return torch.addmm(residual, x, self.weight.t())


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [rows, 2 width], gate first -> [rows, width]."""
    width = int(gate_up.shape[-1]) // 2
    gate, up = gate_up.split([width, width], -1)
    return F.silu(gate) * up


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix.

    Source: transformers Qwen3OmniMoeMLP.forward.
    """

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * width)
        self.down = Linear(width, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, hidden] -> [rows, hidden]."""
        return self.down(gated(self.gate_up(x)))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x)."""
        return self.down.add_to(residual, gated(self.gate_up(x)))
