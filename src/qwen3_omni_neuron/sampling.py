"""Sampling beside the models: transformers' processors in their order, random numbers by request.

Order: repetition penalty, suppression, temperature, top-k, top-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.model.sampler import sample_top


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

    So a seed fixes text, codes and samples, and the text hangs neither on what the talker draws
    nor on which of them runs first.
    """

    def __init__(self, seed: int):
        thinker, talker = np.random.SeedSequence(seed).spawn(2)
        self.thinker = np.random.Generator(np.random.PCG64(thinker))
        self.talker = np.random.Generator(np.random.PCG64(talker))


def draw(generator: np.random.Generator, count: int) -> NDArray[np.float32]:
    """float32 [count], uniform in [0, 1)."""
    return generator.random(count, dtype=np.float32)


class Sampler:
    """Draws one sequence's ids from its logits, and remembers them for the repetition penalty.

    history: ids that count as seen from the start. suppressed: ids that are never drawn.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        history: Tensor | None = None,
        suppressed: Sequence[int] = (),
    ):
        self._params = params
        self._penalties: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._penalties = torch.ones(vocab_size)
            if history is not None:
                self._penalties[history] = params.repetition_penalty
        self._suppressed: Tensor | None = None
        if suppressed:
            self._suppressed = torch.zeros(vocab_size)
            self._suppressed[list(suppressed)] = float("-inf")
        self._top_p = torch.tensor([params.top_p])

    def next(self, logits: Tensor, generator: np.random.Generator) -> int:
        """The next id. logits: [1, vocab]."""
        scores = self.scores(logits)
        if self._params.do_sample:
            uniform = torch.from_numpy(draw(generator, 1))
            scores = scores / self._params.temperature
            chosen = int(sample_top(scores, uniform, self._params.top_k, self._top_p))
        else:
            chosen = int(scores.argmax())
        if self._penalties is not None:
            self._penalties[chosen] = self._params.repetition_penalty
        return chosen

    def scores(self, logits: Tensor) -> Tensor:
        """float32 logits after repetition penalty and suppression."""
        scores = logits.float()
        if self._penalties is not None:
            # The reference divides a positive logit and multiplies a negative one: of the two
            # the lower, where the penalty is above 1, else the higher. Unseen ids have penalty 1.
            lower = self._params.repetition_penalty > 1
            pick = torch.minimum if lower else torch.maximum
            scores = pick(scores * self._penalties, scores / self._penalties)
        if self._suppressed is not None:
            scores = scores + self._suppressed
        return scores
