"""Sampling as a graph can do it: static shapes, the random numbers as an input."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

RunningSum = Callable[[Tensor], Tensor]
"""[rows, k] -> [rows, k], each the sum up to and with itself."""


def running_sum(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def running_sum_by_product(x: Tensor) -> Tensor:
    """For a graph on Neuron, which has no running sum of floats; rounds otherwise in the last bit.

    k * k ones: for a top-k, not for a vocabulary.
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
    `top_p_limits`; limits: int64 [rows], each row's own top-k, 1 to `top_k`, or None where `top_k`
    is that of all.
    Returns int64 [rows]. Kept set and probabilities are those of transformers' TopKLogitsWarper
    and TopPLogitsWarper, in this order; of equal logits at the k-th place one is kept, not all.
    """
    k = min(top_k, logits.shape[-1]) if top_k > 0 else logits.shape[-1]
    values, ids = logits.float().topk(k)
    if limits is not None:
        places = torch.arange(k, device=limits.device)
        values = values.masked_fill(places >= limits[:, None], float("-inf"))
    cumulative = running_sum(kept_probabilities(values, top_p, running_sum))
    # Of all that is kept: what top-p drops adds nothing to the sum.
    rank = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(-1, keepdim=True)
    return ids.gather(1, rank).squeeze(1)


def top_p_limits(top_p: Sequence[float]) -> Tensor:
    """top_p of several rows as sample_top takes it: 1 keeps all ids, whatever rounding makes of
    their sum."""
    return torch.tensor([limit if limit < 1 else float("inf") for limit in top_p])


def kept_probabilities(
    values: Tensor, top_p: Tensor, running_sum: RunningSum = running_sum
) -> Tensor:
    """Probabilities [rows, k] of descending logits, 0 beyond top-p; they add up to what is kept.

    An id goes when the likelier ones together hold top_p already; the likeliest always stays.
    """
    probabilities = torch.softmax(values, -1)
    likelier = running_sum(probabilities) - probabilities
    return probabilities * (likelier < top_p[:, None])
