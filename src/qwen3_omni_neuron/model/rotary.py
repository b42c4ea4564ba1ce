"""Rotary embedding: angles in float32, three axes (time, height, width) interleaved."""

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import RopeConfig
from qwen3_omni_neuron.model.layers import cut

Rotation = tuple[Tensor, Tensor]
"""Cos and sin, float32 [..., 1, head_dim]; sin has the sign of the swapped half."""


class Rotary(nn.Module):
    """Cos and sin of positions, computed at each call.

    Positions may be fractions: a video's follow timestamps (see prompt.prompt). Source:
    transformers Qwen3OmniMoeThinkerTextRotaryEmbedding.forward.
    """

    frequencies: Tensor
    sign: Tensor
    axis: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int):
        super().__init__()
        # On the CPU even if weights are on the meta device: checkpoints lack these.
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / (rope.theta ** (steps / head_dim))
        self.register_buffer("frequencies", frequencies.repeat(2), persistent=False)
        sign = torch.ones_like(self.frequencies)
        sign[: head_dim // 2] = -1
        self.register_buffer("sign", sign, persistent=False)
        axis = _axis_of_frequency(rope.mrope_section, head_dim // 2)
        self.register_buffer("axis", axis.repeat(2), persistent=False)

    def at(self, positions: Tensor) -> Rotation:
        """Return cos and sin if the three axes are equal. positions: float32 [...]."""
        return self._of_angles(positions.unsqueeze(-1) * self.frequencies)

    def at_axes(self, positions: Tensor) -> Rotation:
        """Return cos and sin. positions: float32 [3, rows]: time, height, width."""
        return self._of_angles(positions.index_select(0, self.axis).t() * self.frequencies)

    def _of_angles(self, angles: Tensor) -> Rotation:
        return angles.cos().unsqueeze(-2), (angles.sin() * self.sign).unsqueeze(-2)


class RotaryTable(nn.Module):
    """Cos and sin of positions 0 up to `positions`, computed once.

    For the code predictor, whose 16 positions are the same in every frame.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int):
        super().__init__()
        count = torch.arange(positions, dtype=torch.float32, device="cpu")
        cos, sin = Rotary(rope, head_dim).at(count)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def span(self, start: int, stop: int) -> Rotation:
        """Return cos and sin of positions `start` up to `stop`, [stop - start, 1, head_dim]."""
        return self.cos[start:stop], self.sin[start:stop]


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Return x * cos + y * sin, where y is x with its two halves swapped.

    x: [..., rows, heads, head_dim]. The first half of `sin` has the sign of the rotation.
    """
    cos, sin = rotation
    first, second = cut(x, -1, x.shape[-1] // 2)
    return x * cos + torch.cat((second, first), -1) * sin


def _axis_of_frequency(section: tuple[int, int, int] | None, frequencies: int) -> Tensor:
    """Return the axis (0 time, 1 height, 2 width) that each frequency follows.

    Interleaved: for sections (24, 20, 20), 60 frequencies t h w t h w ..., then t t t t.
    """
    axis = torch.zeros(frequencies, dtype=torch.int64, device="cpu")
    if section is not None:
        for number in (1, 2):
            axis[number : 3 * section[number] : 3] = number
    return axis
