"""text_projection(embedding) of the whole vocabulary, so that no frame waits for one."""

from collections.abc import Callable

import torch
from torch import Tensor

ROWS_AT_ONCE = 4096  # bounds what the projection needs beside its result


@torch.inference_mode()
def text_row_table(embedding: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
    """Talker rows [vocab, talker hidden] of all text tokens.

    embedding: the thinker's table [vocab, thinker hidden]. project: the text projection.
    """
    first = project(embedding[:ROWS_AT_ONCE])
    table = first.new_empty(len(embedding), first.shape[1])
    table[:ROWS_AT_ONCE] = first
    for start in range(ROWS_AT_ONCE, len(embedding), ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        table[start:stop] = project(embedding[start:stop])
    return table
