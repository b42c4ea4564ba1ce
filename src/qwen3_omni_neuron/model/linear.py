"""The bias-free matrix of the decoders."""

import torch
from torch import Tensor, nn


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
