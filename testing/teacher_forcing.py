"""The code predictor over given codes, whose logits a test compares at every step."""

import torch
from torch import Tensor

from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.kv_cache import FrameCache


def teacher_forced_logits(predictor: CodePredictor, hidden: Tensor, codes: Tensor) -> Tensor:
    """Return the logits of the 15 steps over given codes, [slots, 15, vocab].

    hidden: [slots, hidden]; codes: int64 [slots, 16].
    """
    row = predictor.code0_embedding.weight.index_select(0, codes[:, 0])
    cache = FrameCache()
    rows = torch.stack((hidden, row), 1).flatten(0, 1)
    logits = []
    for step in range(predictor.steps):
        logits.append(predictor._logits(rows, step, cache))
        rows = predictor.embedding[step].index_select(0, codes[:, step + 1])
    return torch.stack(logits, 1)
