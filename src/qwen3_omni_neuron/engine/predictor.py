"""The code predictor as the talker's engine uses it, on whatever it runs."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.model.sampler import top_p_limits
from qwen3_omni_neuron.runtime.protocols import PredictorSampling


class Predictor(Protocol):
    """Writes the rest of frames, each sampled in its own way."""

    def predict(
        self, hidden: Tensor, code0: Tensor, sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        """hidden: [n, hidden], the talker's, post-norm; code0: int64 [n]. Returns codes int64
        [n, 16], code 0 first, and the feedback [n, hidden]: see model.code_predictor."""
        ...


def draws(sampling: Sequence[PredictorSampling]) -> tuple[Tensor, Tensor]:
    """Uniforms [n, 15] and top-p limits [n] of frames that are all sampled, as a graph takes
    them."""
    uniforms = [how.uniforms for how in sampling if how.uniforms is not None]
    return torch.from_numpy(np.stack(uniforms)), top_p_limits([how.top_p for how in sampling])
