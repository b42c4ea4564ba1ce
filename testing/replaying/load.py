"""The load of a replay: requests as long as those that port #167 was measured with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Quantiles = Sequence[tuple[float, float]]

# Published for its 100 conversations: p50, p90 and p95, the shortest and the longest prompt, at
# most 200 thinker tokens, at most 500 talker tokens, which 12 of 100 replies reached; and the
# means, from which the remaining ends are chosen.
PROMPT_ROWS: Quantiles = ((0, 1164), (0.5, 1278), (0.9, 1400), (0.95, 1419), (1, 1494))
AUDIO_S: Quantiles = ((0, 1.5), (0.5, 4.27), (0.9, 9.26), (0.95, 9.86), (1, 13.0))  # mean 5.2
TEXT_TOKENS: Quantiles = ((0, 43), (0.5, 59), (0.9, 81), (0.95, 151), (1, 200))  # mean 68
FRAMES: Quantiles = ((0, 40), (0.5, 163), (0.88, 307), (0.88001, 499), (1, 499))  # mean 200
SYSTEM_ROWS = 800  # about the length of the system segment, which the talker skips


@dataclass(frozen=True)
class RequestLengths:
    """Lengths of one request (rows of both prompts, seconds of its audio) and of its reply."""

    prompt_rows: int
    talker_rows: int
    audio_s: float
    text_tokens: int
    frames: int


def make_load(count: int, seed: int) -> list[RequestLengths]:
    """Make `count` requests whose lengths are spread evenly over the published distributions.

    Longer texts have longer speech. The seed sets only their order, and which reply each prompt
    has.
    """
    dice = np.random.Generator(np.random.PCG64(seed))
    ranks = (np.arange(count) + 0.5) / count
    prompts, clips, replies = (dice.permutation(ranks) for _ in range(3))
    rows = _at(PROMPT_ROWS, prompts).round().astype(int).tolist()
    tokens = _at(TEXT_TOKENS, replies).round().astype(int).tolist()
    frames = _at(FRAMES, replies).round().astype(int).tolist()
    audio_s = _at(AUDIO_S, clips).tolist()
    return [
        RequestLengths(row, row - SYSTEM_ROWS, seconds, text, spoken)
        for row, seconds, text, spoken in zip(rows, audio_s, tokens, frames, strict=True)
    ]


def _at(quantiles: Quantiles, ranks: np.ndarray) -> np.ndarray:
    points, values = zip(*quantiles, strict=True)
    return np.interp(ranks, points, values)
