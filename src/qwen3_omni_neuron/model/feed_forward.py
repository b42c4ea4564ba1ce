"""The gated feed-forward."""

import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.linear import Linear


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
