"""text_projection(embedding) of the whole vocabulary, so that no frame waits for one."""

import torch
from torch import Tensor

from qwen3_omni_neuron.model.talker_prompt import ResizeMlp

ROWS_AT_ONCE = 4096  # bounds what the projection needs beside its result


@torch.inference_mode()
def text_row_table(embedding: Tensor, projection: ResizeMlp) -> Tensor:
    """Talker rows [vocab, talker hidden] of all text tokens.

    embedding: the thinker's table [vocab, thinker hidden].
    """
    table = torch.empty((len(embedding), projection.fc2.out_features), dtype=embedding.dtype)
    for start in range(0, len(embedding), ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        table[start:stop] = projection(embedding[start:stop])
    return table
