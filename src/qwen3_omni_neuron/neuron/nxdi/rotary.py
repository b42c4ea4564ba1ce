"""Rotary angles as NxDI's attention asks for them."""

from torch import Tensor, nn

from qwen3_omni_neuron.model.config import RopeConfig
from qwen3_omni_neuron.model.rotary import Rotary


class AxisRotary(nn.Module):
    """cos and sin of positions over time, height and width, as model.rotary has them.

    Frequencies are held outside of parameters and buffers: NxDI casts all of those to the model's
    precision, and a frequency in bfloat16 is off by up to 1 in 256, so that position 1000 would
    turn by several radians too much or too little.
    """

    def __init__(self, rope: RopeConfig, head_dim: int):
        super().__init__()
        ours = Rotary(rope, head_dim)
        self._constants = ours.frequencies, ours.axis

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, S, head_dim] in x's precision. positions: float32 [3, B, S]."""
        frequencies, axis = (constant.to(positions.device) for constant in self._constants)
        of_axis = positions.float().index_select(0, axis)  # [head_dim, B, S]
        angles = of_axis.permute(1, 2, 0) * frequencies
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
