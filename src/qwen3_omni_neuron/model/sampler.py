"""Sampling inside a graph: static shapes, random numbers as an input."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

RunningSum = Callable[[Tensor], Tensor]
"""Function from [rows, k] to the sums along axis 1, each up to and including its own column."""


def running_sum(x: Tensor) -> Tensor:
    """Return the running sum of each row."""
    return x.cumsum(-1)


def running_sum_by_product(x: Tensor) -> Tensor:
    """Return the running sum of each row as a product with a triangle of ones.

    For a graph on Neuron, which has no running sum of floats. The last bit may be rounded
    differently from `running_sum`. The triangle is k * k: for a top-k, not for a vocabulary.
    """
    return torch.mm(x, torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).triu())


def sample_top(
    logits: Tensor,
    uniforms: Tensor,
    top_k: int,
    top_p: Tensor,
    running_sum: RunningSum = running_sum,
    limits: Tensor | None = None,
) -> Tensor:
    """Draw one id a row from the top-k, then top-p, part of softmax(logits).

    logits: [rows, vocab]; uniforms: float32 [rows] in [0, 1); top_p: float32 [rows], see
    `top_p_limits`; limits: int64 [rows], each row's own top-k, 1 to `top_k`, or None where it is
    `top_k` for all.
    Returns int64 [rows]. The ids that remain and their probabilities are those of transformers'
    TopKLogitsWarper and then TopPLogitsWarper, except that only one of several equal logits at the
    k-th place remains.
    """
    k = min(top_k, logits.shape[-1]) if top_k > 0 else logits.shape[-1]
    values, ids = logits.float().topk(k)
    if limits is not None:
        places = torch.arange(k, device=limits.device)
        values = values.masked_fill(places >= limits[:, None], float("-inf"))
    cumulative = running_sum(kept_probabilities(values, top_p, running_sum))
    # The total is that of the kept ids: those that top-p drops add 0.
    rank = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(-1, keepdim=True)
    return ids.gather(1, rank).squeeze(1)


def top_p_limits(top_p: Sequence[float]) -> Tensor:
    """Return the top_p of several rows as sample_top takes it, float32 [rows].

    1 becomes infinity, which keeps all ids even where rounding lifts their sum above 1.
    """
    return torch.tensor([limit if limit < 1 else float("inf") for limit in top_p])


def kept_probabilities(
    values: Tensor, top_p: Tensor, running_sum: RunningSum = running_sum
) -> Tensor:
    """Return the probabilities [rows, k] of descending logits, with 0 for ids that top-p drops.

    They are not normalised again. An id is dropped when the likelier ones together reach top_p;
    the likeliest always stays.
    """
    probabilities = torch.softmax(values, -1)
    likelier = running_sum(probabilities) - probabilities
    return probabilities * (likelier < top_p[:, None])
