"""Sampling of text tokens and code 0 from logits, on the host.

In the order of transformers' logits processors: repetition penalty, suppression, temperature,
top-k, top-p, min-p; a grammar's mask precedes the temperature, OpenAI's penalties follow the
repetition penalty. The id with the largest sum of score and noise (engines.noise) is drawn.
model.code_predictor draws codes 1 to 15 alike on the device.

In numpy: torch operations release the interpreter lock, for which a stage would wait.
cpu.native.sampler does this in C.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.noise import Floats, Noise, noise_of_rows

Ids = NDArray[np.int64]
Mask = NDArray[np.uint32]
SampleIds = Callable[[Sequence["Sampler"], Sequence[Tensor]], list[int]]
"""`sample_ids` or an equivalent."""
Remaining = tuple[Ids, Floats]
"""Ascending indices into a sequence's allowed ids, and scores <= 0; none: NOT_FINITE."""
NOT_FINITE = -1
"""Id for logits with NaN or +inf among the allowed ids, or all -inf."""
_MASK_BITS = 32


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one kind of id.

    do_sample: False takes the likeliest id after penalties and suppression. top_k: 0: no limit.
    min_p: minimum probability relative to the likeliest id's. presence_penalty, frequency_penalty:
    subtracted from the score of a sampled id, once and per occurrence.
    """

    do_sample: bool
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


def allowed_ids(vocab_size: int, suppressed: Sequence[int]) -> Ids:
    """Return the ids of a vocabulary that may be sampled, ascending."""
    allowed = np.ones(vocab_size, dtype=bool)
    allowed[[i for i in suppressed if 0 <= i < vocab_size]] = False
    return allowed.nonzero()[0]


class Sampler:
    """Sampling state of one sequence: parameters, noise, and the ids it contains.

    allowed: ids that may be sampled, ascending; None: all of `vocab_size`. history: initial ids,
    all allowed. position: number of sampled ids. penalties: float32 per allowed id, 1 where the
    sequence lacks it; None without a repetition penalty. counts: int32, occurrences of each allowed
    id; None without presence_penalty and frequency_penalty. prepared: data that a `SampleIds`
    caches. mask: uint32 [ceil(vocab_size / 32)], C-contiguous: a bit per possible next id from the
    lowest, at least one; None: every id. Only if `allowed` is None.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        noise: Noise,
        history: Tensor | None = None,
        allowed: Ids | None = None,
    ):
        self.params, self.noise, self.allowed = params, noise, allowed
        self.position = 0
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
    """Sample each sequence's next id, or NOT_FINITE. logits: [1, vocab] each."""
    return draw(samplers, [_remaining(*each) for each in zip(samplers, logits, strict=True)])


def draw(samplers: Sequence[Sampler], remaining: Sequence[Remaining]) -> list[int]:
    """Draw each sequence's next id, or NOT_FINITE, and note it in the sampler."""
    ids = [
        indices if sampler.allowed is None else sampler.allowed[indices]
        for sampler, (indices, _) in zip(samplers, remaining, strict=True)
    ]
    noise = noise_of_rows([sampler.noise.at(sampler.position) for sampler in samplers], ids)
    drawn, start = list[int](), 0
    for sampler, of_row, (indices, scores) in zip(samplers, ids, remaining, strict=True):
        if not len(indices):
            drawn.append(NOT_FINITE)
            continue
        best = (scores + noise[start : start + len(scores)]).argmax()
        start += len(scores)
        sampler.position += 1
        if sampler.penalties is not None:
            sampler.penalties[indices[best]] = sampler.params.repetition_penalty
        if sampler.counts is not None:
            sampler.counts[indices[best]] += 1
        drawn.append(int(of_row[best]))
    return drawn


def is_finite(logits: Tensor) -> bool:
    """Return whether no logit is NaN or +inf."""
    return bool(logits.float().numpy().max() < np.inf)  # the maximum with NaN is NaN


def log_probabilities(logits: Tensor, ids: Sequence[int] | Ids) -> list[float]:
    """Return the log-probabilities of `ids` in one sequence's logits [1, vocab]."""
    scores = logits.float().numpy().ravel()
    most = scores.max()
    total = np.exp(scores - most).sum(dtype=np.float64)
    found: list[float] = (scores[ids] - most - np.log(total)).tolist()
    return found


def likeliest(logits: Tensor, count: int) -> list[tuple[int, float]]:
    """Return one sequence's likeliest ids and log-probabilities, in descending order."""
    scores = logits.float().numpy().ravel()
    count = min(count, len(scores))
    ids = scores.argpartition(len(scores) - count)[len(scores) - count :]
    ids = ids[(-scores[ids]).argsort(kind="stable")]
    return list(zip(ids.tolist(), log_probabilities(logits, ids), strict=True))


def all_ids_but(vocab_size: int, forbidden: Iterable[int]) -> Mask:
    """Return the mask of all but the forbidden ids; see Sampler.mask."""
    mask = np.full(-(-vocab_size // _MASK_BITS), 2**_MASK_BITS - 1, np.uint32)
    for token_id in forbidden:
        if token_id < vocab_size:
            mask[token_id // _MASK_BITS] &= ~np.uint32(1 << token_id % _MASK_BITS)
    return mask


def processed(sampler: Sampler, logits: Tensor) -> Floats:
    """Return scores of the allowed ids: logits [1, vocab] after suppression, penalties, mask."""
    scores: Floats = logits.float().numpy()[0]
    if sampler.allowed is not None:  # first, so that later operations have fewer ids
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


def kept(scores: Floats, top_k: int, top_p: float, min_p: float = 0.0) -> Ids:
    """Return the indices that top-k, top-p and min-p leave of scores [vocab], ascending.

    As transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, in this order; equal
    scores at the edge of top-p stay together. top_k 0: no limit.
    """
    least, most, vocab = np.float32(-np.inf), scores.max(), len(scores)
    if 0 < top_k < vocab:
        least = np.partition(scores, vocab - top_k)[vocab - top_k]
    indices = ((scores >= least) & (scores > -np.inf)).nonzero()[0]
    # With top_p 1 all ids stay, even if rounded sums reach 1 before the last.
    if top_p < 1:
        ordered = np.sort(scores[indices])[::-1]
        probabilities = np.exp(ordered - most)
        probabilities /= probabilities.sum()
        # Drop an id if likelier ones reach top_p: the likeliest stays.
        likelier = probabilities.cumsum(dtype=np.float64) - probabilities
        indices = indices[scores[indices] >= ordered[likelier < np.float32(top_p)].min()]
    if min_p:
        indices = indices[np.exp(scores[indices] - most) >= np.float32(min_p)]
    return indices


def _remaining(sampler: Sampler, logits: Tensor) -> Remaining:
    """Return candidates for the next id: one if greedy."""
    params, scores = sampler.params, processed(sampler, logits)
    most = scores.max()
    if not np.isfinite(most):  # the maximum with NaN is NaN
        return np.empty(0, np.int64), np.empty(0, np.float32)
    if not params.do_sample:
        return np.array([scores.argmax()]), np.zeros(1, np.float32)
    # Subtract first: at a low temperature large scores would round the noise away.
    scores = (scores - most) / np.float32(params.temperature)
    indices = kept(scores, params.top_k, params.top_p, params.min_p)
    return indices, scores[indices]
