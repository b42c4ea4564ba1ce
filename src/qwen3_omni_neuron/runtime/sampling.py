"""Sampling beside the models: transformers' processors in their order, random numbers by request.

Order: repetition penalty, suppression, temperature, top-k, top-p. In numpy: a stage draws between
two steps while other threads wait for the interpreter, and each operation of torch lets go of it.
See model.sampler for sampling inside a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class SamplingParams:
    """top_k 0: no limit. Not do_sample: the likeliest, after penalty and suppression."""

    do_sample: bool
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0


class RequestRandom:
    """The random numbers of one request: a stream of its own for the thinker and the talker.

    So a seed fixes text and codes (and samples, but for the rounding that follows the sizes of
    the chunks, which follow the time), and the text hangs neither on what the talker draws
    nor on which of them runs first.
    """

    def __init__(self, seed: int):
        thinker, talker = np.random.SeedSequence(seed).spawn(2)
        self.thinker = np.random.Generator(np.random.PCG64(thinker))
        self.talker = np.random.Generator(np.random.PCG64(talker))


def draw(generator: np.random.Generator, count: int) -> Floats:
    """float32 [count], uniform in [0, 1)."""
    return generator.random(count, dtype=np.float32)


def allowed_ids(vocab_size: int, suppressed: Sequence[int]) -> Ids:
    """The ids of a vocabulary that may be drawn, ascending."""
    return np.setdiff1d(np.arange(vocab_size), list(suppressed))


class Sampler:
    """How one sequence draws its ids: its parameters, its random numbers, and the ids it has had.

    allowed: the ids that may be drawn, ascending, or None for all of `vocab_size`. history: ids,
    of those, that count as had from the start.
    penalties: float32, one an allowed id: 1 for one that it has not had. None where it has none.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        generator: np.random.Generator,
        history: Tensor | None = None,
        allowed: Ids | None = None,
    ):
        self.params, self.generator, self.allowed = params, generator, allowed
        self.penalties: Floats | None = None
        if params.repetition_penalty != 1.0:
            self.penalties = np.ones(vocab_size if allowed is None else len(allowed), np.float32)
            if history is not None:
                had = history.numpy()
                had = had if allowed is None else np.searchsorted(allowed, had)
                self.penalties[had] = params.repetition_penalty


def draw_ids(samplers: Sequence[Sampler], logits: Tensor) -> list[int]:
    """The next id of each of several sequences, drawn together.

    samplers: all have the same allowed ids. logits: [sequences, vocab]. What a sequence draws does
    not depend on the others.
    """
    scores, allowed = processed(samplers, logits), samplers[0].allowed
    ids = [0] * len(samplers)
    for top_k, rows in _alike(samplers).items():
        part = scores if len(rows) == len(ids) else scores[rows]
        chosen = [samplers[row] for row in rows]
        places = part.argmax(-1) if top_k is None else _sample(chosen, part, top_k)
        for row, sampler, place in zip(rows, chosen, places.tolist(), strict=True):
            ids[row] = place if allowed is None else int(allowed[place])
            if sampler.penalties is not None:
                sampler.penalties[place] = sampler.params.repetition_penalty
    return ids


def processed(samplers: Sequence[Sampler], logits: Tensor) -> Floats:
    """float32 logits [sequences, allowed ids] after repetition penalty and suppression."""
    scores: Floats = logits.float().numpy()
    if samplers[0].allowed is not None:  # first, as what follows is paid by the id
        scores = scores.take(samplers[0].allowed, 1)
    if any(sampler.penalties is not None for sampler in samplers):
        none = np.ones(scores.shape[1], dtype=np.float32)
        penalties = np.stack([none if s.penalties is None else s.penalties for s in samplers])
        scores = np.where(scores < 0, scores * penalties, scores / penalties)
    return scores


def kept(scores: Floats, top_k: int, top_p: Floats) -> tuple[Ids, Floats]:
    """What the top-k, then top-p, part of softmax(scores) holds, likeliest first.

    scores: float32 [sequences, vocab]; top_k: 0 for no limit; top_p: float32 [sequences].
    Returns places [sequences, k] in the scores and probabilities [sequences, k], 0 beyond top-p;
    they add up to what is kept. Kept set and probabilities are those of transformers'
    TopKLogitsWarper and TopPLogitsWarper, in this order; of equal scores at the k-th place one is
    kept, not all.
    """
    vocab, row = scores.shape[1], np.arange(len(scores))[:, None]
    if 0 < top_k < vocab:
        places = scores.argpartition(vocab - top_k)[:, vocab - top_k :]
        places = places[row, (-scores[row, places]).argsort(kind="stable")]
    else:
        places = (-scores).argsort(kind="stable")
    values = scores[row, places]
    probabilities = np.exp(values - values[:, :1])
    probabilities /= probabilities.sum(-1, keepdims=True)
    # An id goes when the likelier ones together hold top_p already; the likeliest always stays.
    # Where top_p is 1 all stay, whatever rounding makes of their sum.
    likelier = probabilities.cumsum(-1, dtype=np.float64) - probabilities
    limits = np.where(top_p < 1, top_p, np.inf)[:, None]
    return places, probabilities * (likelier < limits)


def _alike(samplers: Sequence[Sampler]) -> dict[int | None, list[int]]:
    """Rows that one operation can draw, by their top_k, a shape in it; None for greedy ones."""
    rows: dict[int | None, list[int]] = {}
    for row, sampler in enumerate(samplers):
        key = sampler.params.top_k if sampler.params.do_sample else None
        rows.setdefault(key, []).append(row)
    return rows


def _sample(samplers: Sequence[Sampler], scores: Floats, top_k: int) -> Ids:
    """Places [sequences] in the scores."""
    how = [(s.params.temperature, s.params.top_p, draw(s.generator, 1)[0]) for s in samplers]
    temperature, top_p, uniform = np.array(how, dtype=np.float32).T
    places, probabilities = kept(scores / temperature[:, None], top_k, top_p)
    # Of all that is kept: what top-p drops adds nothing to the sum.
    cumulative = probabilities.cumsum(-1, dtype=np.float64)
    rank = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1)
    return places[np.arange(len(places)), rank]
