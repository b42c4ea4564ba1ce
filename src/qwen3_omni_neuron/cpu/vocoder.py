"""code2wav on the CPU."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.model.code2wav import Code2Wav


class CpuVocoder:
    """Serves runtime.protocols.Vocoder over model.code2wav."""

    def __init__(self, code2wav: Code2Wav):
        self._code2wav = code2wav

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> NDArray[np.float32]:
        if not len(codes):
            return np.zeros(0, dtype=np.float32)
        return self._code2wav(codes.t()[None])[0].float().numpy()
