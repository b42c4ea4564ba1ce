"""Sampling beside the models: transformers' processors in their order, random numbers by request.

Order: repetition penalty, suppression, temperature, top-k, top-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.model.sampler import sample_top, top_p_limits


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


def draw(generator: np.random.Generator, count: int) -> NDArray[np.float32]:
    """float32 [count], uniform in [0, 1)."""
    return generator.random(count, dtype=np.float32)


class Sampler:
    """How one sequence draws its ids: its parameters, its random numbers, and the ids it has had.

    history: ids that count as had from the start.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        generator: np.random.Generator,
        history: Tensor | None = None,
    ):
        self.params, self.generator = params, generator
        self.penalties: Tensor | None = None  # [vocab], 1 for an id that it has not had
        if params.repetition_penalty != 1.0:
            self.penalties = torch.ones(vocab_size)
            if history is not None:
                self.penalties[history] = params.repetition_penalty


def suppression(vocab_size: int, ids: Sequence[int]) -> Tensor:
    """float32 [vocab]: minus infinity at ids that are never drawn, else 0."""
    return torch.zeros(vocab_size).index_fill(0, torch.tensor(ids).long(), float("-inf"))


def draw_ids(
    samplers: Sequence[Sampler], logits: Tensor, suppressed: Tensor | None = None
) -> list[int]:
    """The next id of each of several sequences, drawn together.

    logits: [sequences, vocab]; suppressed: see `suppression`. What a sequence draws does not
    depend on the others.
    """
    scores = processed(samplers, logits, suppressed)
    ids = [0] * len(samplers)
    for top_k, rows in _alike(samplers).items():
        part = scores if len(rows) == len(ids) else scores[rows]
        chosen = [samplers[row] for row in rows]
        drawn = part.argmax(-1) if top_k is None else _sample(chosen, part, top_k)
        for row, sampler, drawn_id in zip(rows, chosen, drawn.tolist(), strict=True):
            ids[row] = drawn_id
            if sampler.penalties is not None:
                sampler.penalties[drawn_id] = sampler.params.repetition_penalty
    return ids


def processed(
    samplers: Sequence[Sampler], logits: Tensor, suppressed: Tensor | None = None
) -> Tensor:
    """float32 logits [sequences, vocab] after repetition penalty and suppression."""
    scores = logits.float()
    if any(sampler.penalties is not None for sampler in samplers):
        none = torch.ones(())
        rows = [none if s.penalties is None else s.penalties for s in samplers]
        penalties = rows[0] if len(rows) == 1 else torch.stack(torch.broadcast_tensors(*rows))
        scores = torch.where(scores < 0, scores * penalties, scores / penalties)
    return scores if suppressed is None else scores + suppressed


def _alike(samplers: Sequence[Sampler]) -> dict[int | None, list[int]]:
    """Rows that one operation can draw, by their top_k, a shape in it; None for greedy ones."""
    rows: dict[int | None, list[int]] = {}
    for row, sampler in enumerate(samplers):
        key = sampler.params.top_k if sampler.params.do_sample else None
        rows.setdefault(key, []).append(row)
    return rows


def _sample(samplers: Sequence[Sampler], scores: Tensor, top_k: int) -> Tensor:
    """Ids int64 [sequences]."""
    temperatures = torch.tensor([sampler.params.temperature for sampler in samplers])
    uniforms = np.concatenate([draw(sampler.generator, 1) for sampler in samplers])
    top_p = top_p_limits([sampler.params.top_p for sampler in samplers])
    return sample_top(scores / temperatures[:, None], torch.from_numpy(uniforms), top_k, top_p)
