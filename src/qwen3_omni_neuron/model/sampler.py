"""Sampling as a graph can do it: static shapes, the random numbers as an input."""

import torch
from torch import Tensor


def sample_top(logits: Tensor, uniforms: Tensor, top_k: int, top_p: Tensor) -> Tensor:
    """Draw one id a row from the top-k, then top-p, part of softmax(logits).

    logits: [rows, vocab]; uniforms: float32 [rows] in [0, 1); top_p: float32 [rows].
    Returns int64 [rows]. Kept set and probabilities are those of transformers' TopKLogitsWarper
    and TopPLogitsWarper, in this order; of equal logits at the k-th place one is kept, not all.
    """
    k = min(top_k, logits.shape[-1]) if top_k > 0 else logits.shape[-1]
    values, ids = logits.float().topk(k)
    probabilities = kept_probabilities(values, top_p)
    cumulative = probabilities.cumsum(-1)
    # Scaled by the total, so that a sum just below 1 never leaves a draw without an id.
    rank = (cumulative <= (uniforms * cumulative[:, -1])[:, None]).sum(-1, keepdim=True)
    return ids.gather(1, rank).squeeze(1)


def kept_probabilities(values: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities [rows, k] of descending logits, 0 beyond top-p.

    An id goes when it and all less likely ones together hold at most 1 - top_p; the likeliest
    always stays.
    """
    tail = torch.softmax(values, -1).flip(-1).cumsum(-1).flip(-1)
    drop = tail <= (1 - top_p)[:, None]
    drop[:, 0] = False
    return torch.softmax(values.masked_fill(drop, float("-inf")), -1)
