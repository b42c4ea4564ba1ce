"""Rotary positions: tables in float32, three axes (time, height, width) interleaved."""

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.config import RopeConfig

Rotation = tuple[Tensor, Tensor]
"""cos and sin, float32 [rows, 1, head_dim]; sin carries the sign of the swapped half."""


class Rotary(nn.Module):
    """cos and sin of every position, as one table a checkpoint part.

    Source: transformers Qwen3OmniMoeThinkerTextRotaryEmbedding.forward.
    """

    cos: Tensor
    sin: Tensor
    axis: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int):
        super().__init__()
        exponents = _count(0, head_dim, 2) / head_dim
        frequencies = 1.0 / (rope.theta**exponents)
        angles = _count(0, positions)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", torch.cat((cos, cos), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1), persistent=False)
        axis = _axis_of_frequency(rope.mrope_section, head_dim // 2)
        self.register_buffer("axis", torch.cat((axis, axis)), persistent=False)

    def at(self, positions: Tensor) -> Rotation:
        """cos and sin [rows, 1, head_dim] where the three axes agree. positions: int64 [rows]."""
        return (
            self.cos.index_select(0, positions).unsqueeze(1),
            self.sin.index_select(0, positions).unsqueeze(1),
        )

    def span(self, start: int, stop: int) -> Rotation:
        """cos and sin [stop - start, 1, head_dim] of the positions from `start` up to `stop`."""
        return self.cos[start:stop, None], self.sin[start:stop, None]

    def at_axes(self, positions: Tensor) -> Rotation:
        """cos and sin [rows, 1, head_dim]. positions: int64 [3, rows], time, height, width."""
        index = positions.index_select(0, self.axis).t()  # [rows, head_dim]
        return (
            self.cos.gather(0, index).unsqueeze(1),
            self.sin.gather(0, index).unsqueeze(1),
        )


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x * cos + swap_halves(x) * sin. x: [rows, heads, head_dim]."""
    cos, sin = rotation
    half = int(x.shape[-1]) // 2
    first, second = x.split((half, half), -1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), sin)


def _count(start: int, stop: int, step: int = 1) -> Tensor:
    # On the CPU even while weights are laid out on the meta device: tables are not loaded.
    return torch.arange(start, stop, step, dtype=torch.float32, device="cpu")


def _axis_of_frequency(section: tuple[int, int, int] | None, frequencies: int) -> Tensor:
    """Which axis (0 time, 1 height, 2 width) each frequency follows.

    Interleaved: with sections (24, 20, 20) frequencies go t h w t h w ... for 60, then t t t t.
    """
    axis = torch.zeros(frequencies, dtype=torch.int64, device="cpu")
    if section is not None:
        for number in (1, 2):
            axis[number : 3 * section[number] : 3] = number
    return axis
