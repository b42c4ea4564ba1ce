"""Requests at once against the same requests one after the other, in one run.

    python -m bench.concurrency --size tiny --requests 8 --json result.json

Checks that each says at once what it says alone before it times anything, and that also warms up;
greedily, since a draw in float32 may lie so near the boundary of two codes that the rounding of
another batch size decides it. Then times sampled requests.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.measure import timed
from bench.common.results import publish, results_of
from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.events import Finished
from qwen3_omni_neuron.tiny import write_tiny_checkpoint

TEXT_TOKENS, FRAMES = 24, 48
QUESTIONS = (
    "What colour is the sky?",
    "Who are you?",
    "Count to three, please.",
    "Why is that so?",
)
GREEDY = {"thinker_do_sample": False, "talker_do_sample": False, "predictor_do_sample": False}
SPEAKERS = ("Ethan", "Chelsie", "Aiden")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--placement", default="shared")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(folder, size=options.size)
        found = compare(checkpoint, options.requests, options.rounds, options.placement)
    publish(results_of("concurrency", arguments, options, *found), options.json)


def compare(
    checkpoint: Path, count: int, rounds: int, placement: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Both ways through the same requests, turn by turn. Times in seconds. Returns a row a round,
    and the summary."""
    requests: list[tuple[Any, dict[str, Any]]] = [
        (
            [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            {"speaker": SPEAKERS[number % len(SPEAKERS)], "seed": number},
        )
        for number in range(count)
    ]
    limits: dict[str, Any] = {
        "thinker_max_new_tokens": TEXT_TOKENS,
        "talker_max_new_tokens": FRAMES + 1,
    }
    with Qwen3Omni.load(
        checkpoint, dtype="float32", max_concurrency=count, placement=placement
    ) as omni:

        def one_by_one(**more: Any) -> list[SpeechResult]:
            return [omni.generate_audio(m, **options, **limits, **more) for m, options in requests]

        def at_once(**more: Any) -> list[SpeechResult]:
            streams = [omni.stream(m, **options, **limits, **more) for m, options in requests]
            return [
                next(event.result for event in stream if isinstance(event, Finished))
                for stream in streams
            ]

        for alone, together in zip(one_by_one(**GREEDY), at_once(**GREEDY), strict=True):
            assert alone.token_ids == together.token_ids, "text differs"
            assert alone.codes.tolist() == together.codes.tolist(), "codes differ"
        rows = [
            {"one_by_one_s": timed(one_by_one), "at_once_s": timed(at_once)} for _ in range(rounds)
        ]
        results = at_once()
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return rows, {
        "frames": sum(len(result.codes) for result in results),
        **medians,
        "ratio": medians["at_once_s"] / medians["one_by_one_s"],
        "ttfb_s_at_once": [result.timings.ttfb_s for result in results],
    }


if __name__ == "__main__":
    main()
