"""text_projection(embedding) as a table that fills as tokens are met."""

import threading

import torch
from torch import Tensor

from qwen3_omni_neuron.model.talker_prompt import ResizeMlp


class TextRows:
    """Talker rows of text tokens: each is projected once, then looked up.

    embedding: the thinker's table [vocab, thinker hidden]. Guarded by a lock: `_known`, and the
    rows that it says are filled.
    """

    def __init__(self, embedding: Tensor, projection: ResizeMlp):
        self._embedding = embedding
        self._projection = projection
        # Not touched until it is filled, so a large vocabulary costs what is used of it.
        self._rows = torch.empty(
            (embedding.shape[0], projection.fc2.out_features), dtype=embedding.dtype
        )
        self._known = torch.zeros(embedding.shape[0], dtype=torch.bool)
        self._lock = threading.Lock()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: int64 [rows]. Returns [rows, talker hidden]."""
        with self._lock:
            new = token_ids[~self._known[token_ids]].unique()
            if len(new):
                self._rows[new] = self._projection(self._embedding[new])
                self._known[new] = True
        return self._rows[token_ids]
