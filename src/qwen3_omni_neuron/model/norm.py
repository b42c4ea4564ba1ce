"""RMSNorm in float32, whatever the model's own precision."""

import math

import torch
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
