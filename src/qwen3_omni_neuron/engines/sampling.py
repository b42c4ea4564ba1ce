"""Sampling on the host: text tokens and code 0 of a frame, sampled from a step's logits.

The operations are those of transformers' logits processors in their order: repetition penalty,
suppression, temperature, top-k, top-p, min-p; a grammar's mask comes before the temperature, and
OpenAI's penalties after the one of repetition. Each request has random numbers of its own.
Codes 1 to 15 are sampled on the device by model.code_predictor, a part of the code predictor's
graph, from uniform numbers that `Uniforms` here makes.

It uses numpy, because each torch operation releases Python's interpreter lock, and a stage would
wait for it. cpu.native.sampler does the same in one call, wherever the C was compiled.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.uint32]
SampleIds = Callable[[Sequence["Sampler"], Sequence[Tensor]], list[int]]
"""`sample_ids`, or a function that computes the same."""
NOT_FINITE = -1
"""Id of a sequence whose logits have NaN or +inf among the allowed ids, or are all -inf."""
UNIFORMS_AT_ONCE = 256  # random numbers, enough for 16 frames
_MASK_BITS = 32


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of the sampling of one kind of id.

    do_sample: False takes the likeliest id after penalties and suppression. top_k: 0 means no
    limit. min_p: least probability of an id, as a part of the likeliest one's. presence_penalty,
    frequency_penalty: numbers taken off an id's score once it was sampled, and for each time.
    """

    do_sample: bool
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class Uniforms:
    """Random numbers of one seed, uniform in [0, 1), each used once.

    Many are made at once: numpy releases Python's interpreter lock for every array of them.
    """

    def __init__(self, seed: np.random.SeedSequence):
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._made, self._used = np.empty(0, np.float32), 0

    def __call__(self, count: int) -> Floats:
        """Return the next float32 [count]."""
        left = len(self._made) - self._used
        if left < count:
            more = self._generator.random(max(count - left, UNIFORMS_AT_ONCE), dtype=np.float32)
            self._made, self._used = np.concatenate((self._made[self._used :], more)), 0
        self._used += count
        return self._made[self._used - count : self._used]


class RequestRandom:
    """Random numbers of one request, separate for the thinker and the talker.

    So a seed fixes text and codes, and audio samples up to rounding, which depends on timing.
    """

    def __init__(self, seed: int):
        self.thinker, self.talker = (
            Uniforms(np.random.SeedSequence(seed, spawn_key=(part,))) for part in range(2)
        )


def allowed_ids(vocab_size: int, suppressed: Sequence[int]) -> Ids:
    """Return the ids of a vocabulary that may be sampled, ascending."""
    allowed = np.ones(vocab_size, dtype=bool)
    allowed[[i for i in suppressed if 0 <= i < vocab_size]] = False
    return allowed.nonzero()[0]


class Sampler:
    """Sampling state of one sequence: parameters, random numbers, and the ids it contains.

    allowed: the ids that may be sampled, ascending, or None for all of `vocab_size`. history: ids
    that the sequence contains from the start, all of them allowed.
    penalties: float32, one for each allowed id, 1 where the sequence does not contain it. None
    where repetition is not penalized. counts: int32, how often each allowed id was sampled; None
    without presence_penalty and frequency_penalty. prepared: data that a `SampleIds` caches for it.
    mask: uint32 [vocab_size / 32, rounded up], C-contiguous: the ids that its next id is one of, a
    bit each from the lowest, at least one of them; None: every id. Only where `allowed` is None.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        uniforms: Uniforms,
        history: Tensor | None = None,
        allowed: Ids | None = None,
    ):
        self.params, self.uniforms, self.allowed = params, uniforms, allowed
        self.vocab_size = vocab_size
        self.prepared: Any = None
        self.mask: Mask | None = None
        self.penalties: Floats | None = None
        if params.repetition_penalty != 1.0:
            self.penalties = np.ones(vocab_size if allowed is None else len(allowed), np.float32)
            if history is not None:
                ids = history.numpy()
                indices = ids if allowed is None else np.searchsorted(allowed, ids)
                self.penalties[indices] = params.repetition_penalty
        self.counts: NDArray[np.int32] | None = None
        if params.presence_penalty or params.frequency_penalty:
            self.counts = np.zeros(vocab_size if allowed is None else len(allowed), np.int32)


def sample_ids(samplers: Sequence[Sampler], logits: Sequence[Tensor]) -> list[int]:
    """Sample the next ids of sequences, NOT_FINITE among them. logits: [1, vocab] of each."""
    return [_sample(*each) for each in zip(samplers, logits, strict=True)]


def is_finite(logits: Tensor) -> bool:
    """Return whether no logit is NaN or +inf."""
    return bool(logits.float().numpy().max() < np.inf)  # the maximum with NaN is NaN


def log_probabilities(logits: Tensor, ids: Sequence[int] | Ids) -> list[float]:
    """Return the log-probabilities of some ids by the logits of one sequence, [1, vocab]."""
    scores = logits.float().numpy().ravel()
    most = scores.max()
    total = np.exp(scores - most).sum(dtype=np.float64)
    found: list[float] = (scores[ids] - most - np.log(total)).tolist()
    return found


def likeliest(logits: Tensor, count: int) -> list[tuple[int, float]]:
    """Return the likeliest ids of one sequence and their log-probabilities, likeliest first."""
    scores = logits.float().numpy().ravel()
    count = min(count, len(scores))
    ids = scores.argpartition(len(scores) - count)[len(scores) - count :]
    ids = ids[(-scores[ids]).argsort(kind="stable")]
    return list(zip(ids.tolist(), log_probabilities(logits, ids), strict=True))


def all_ids_but(vocab_size: int, forbidden: Iterable[int]) -> Mask:
    """Return the mask of a vocabulary's ids without some; see Sampler.mask."""
    mask = np.full(-(-vocab_size // _MASK_BITS), 2**_MASK_BITS - 1, np.uint32)
    for token_id in forbidden:
        if token_id < vocab_size:
            mask[token_id // _MASK_BITS] &= ~np.uint32(1 << token_id % _MASK_BITS)
    return mask


def processed(sampler: Sampler, logits: Tensor) -> Floats:
    """Return float32 scores [allowed ids]: logits [1, vocab] after suppression, penalties, mask."""
    scores: Floats = logits.float().numpy()[0]
    if sampler.allowed is not None:  # first: later operations cost more with more ids
        scores = scores.take(sampler.allowed)
    if sampler.penalties is not None:
        scores = np.where(scores < 0, scores * sampler.penalties, scores / sampler.penalties)
    if sampler.counts is not None:
        counts = sampler.counts.astype(np.float32)
        frequency = np.float32(sampler.params.frequency_penalty)
        presence = np.float32(sampler.params.presence_penalty)
        scores = np.where(counts > 0, scores - (frequency * counts + presence), scores)
    if sampler.mask is not None:
        bits = np.unpackbits(sampler.mask.view(np.uint8), bitorder="little")
        scores = np.where(bits[: len(scores)], scores, np.float32(-np.inf))
    return scores


def kept(scores: Floats, top_k: int, top_p: float, min_p: float = 0.0) -> tuple[Ids, Floats]:
    """Return the ids that top-k, top-p and min-p keep from softmax(scores), likeliest first.

    scores: float32 [vocab]; top_k: 0 for no limit. Returns indices [k] into the scores and
    probabilities [k], 0 where top-p or min-p drops the id, which do not add up to 1. Both are those
    of transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, in this order, except
    that of equal scores at the k-th rank only one is kept.
    """
    vocab = len(scores)
    if 0 < top_k < vocab:
        indices = scores.argpartition(vocab - top_k)[vocab - top_k :]
        indices = indices[(-scores[indices]).argsort(kind="stable")]
    else:
        indices = (-scores).argsort(kind="stable")
    probabilities = np.exp(scores[indices] - scores[indices[0]])
    probabilities /= probabilities.sum()
    # Where top_p is 1 all ids stay, even where their sum is rounded to 1 before the last.
    if top_p < 1:
        # An id is dropped if the likelier ids add up to top_p already, so the likeliest stays.
        likelier = probabilities.cumsum(dtype=np.float64) - probabilities
        probabilities *= likelier < np.float32(top_p)
    if min_p:
        probabilities *= probabilities >= np.float32(min_p) * probabilities[0]
    return indices, probabilities


def _sample(sampler: Sampler, logits: Tensor) -> int:
    """Sample the next id of a sequence, or NOT_FINITE."""
    params, scores = sampler.params, processed(sampler, logits)
    if not np.isfinite(scores.max()):  # the maximum with NaN is NaN
        return NOT_FINITE
    if params.do_sample:
        scores = scores / np.float32(params.temperature)
        indices, probabilities = kept(scores, params.top_k, params.top_p, params.min_p)
        # The last sum is that of all kept ids, since those that are dropped have probability 0.
        cumulative = probabilities.cumsum(dtype=np.float64)
        index = int(indices[(cumulative <= sampler.uniforms(1)[0] * cumulative[-1]).sum()])
    else:
        index = int(scores.argmax())
    if sampler.penalties is not None:
        sampler.penalties[index] = params.repetition_penalty
    if sampler.counts is not None:
        sampler.counts[index] += 1
    return index if sampler.allowed is None else int(sampler.allowed[index])
