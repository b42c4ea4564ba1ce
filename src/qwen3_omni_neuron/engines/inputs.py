"""Small inputs of graph calls, made the same way for every target."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.model.sampler import top_p_limits


class Numbers:
    """Integers from 0 up to `limit` as tensors int64 [1], views of one tensor made beforehand."""

    def __init__(self, limit: int):
        self._numbers = torch.arange(limit)

    def __call__(self, number: int) -> Tensor:
        """Return the tensor of one number."""
        return self._numbers[number : number + 1]


def sampling_inputs(sampling: Sequence[PredictorSampling]) -> tuple[Tensor, Tensor]:
    """Return a graph's uniforms [n, 15] and top-p limits [n] for frames that are all sampled."""
    uniforms = [frame.uniforms for frame in sampling if frame.uniforms is not None]
    return torch.from_numpy(np.stack(uniforms)), top_p_limits([frame.top_p for frame in sampling])
