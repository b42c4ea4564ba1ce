"""Requests at once against the same requests one after the other, in one run.

    python bench/concurrency.py --size tiny --requests 8 --json result.json

Checks that each says at once what it says alone before it times anything, and that also warms up;
greedily, since a draw in float32 may lie so near the boundary of two codes that the rounding of
another batch size decides it. Then times sampled requests.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measure import environment, timed
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--placement", default="shared")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(folder, size=options.size)
        figures = compare(checkpoint, options.requests, options.rounds, options.placement)
    figures = {"size": options.size, "placement": options.placement, **environment(), **figures}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def compare(checkpoint: Path, count: int, rounds: int, placement: str) -> dict[str, Any]:
    """Both ways through the same requests, turn by turn. Times in seconds."""
    requests = [
        (
            [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            {"speaker": SPEAKERS[number % len(SPEAKERS)], "seed": number},
        )
        for number in range(count)
    ]
    limits = {"thinker_max_new_tokens": TEXT_TOKENS, "talker_max_new_tokens": FRAMES + 1}
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
        apart_s, at_once_s = [], []
        for _ in range(rounds):
            apart_s.append(timed(one_by_one))
            at_once_s.append(timed(at_once))
        results = at_once()
    return {
        "requests": count,
        "frames": sum(len(result.codes) for result in results),
        "one_by_one_s": apart_s,
        "at_once_s": at_once_s,
        "ratio": statistics.median(at_once_s) / statistics.median(apart_s),
        "ttfb_s_at_once": [result.timings.ttfb_s for result in results],
    }


if __name__ == "__main__":
    main()
