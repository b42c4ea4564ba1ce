"""Requests at once against the same requests one after the other, in one run.

    python -m bench.concurrency --size tiny --requests 8 --json result.json

Checks that each has the same reply at once as alone before anything is timed, which also warms up;
greedily, since two codes may be so close, noise included, that the rounding of another batch size
decides between them. Then times sampled requests.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench.common.measure import in_turn
from bench.common.models import GREEDY, add_size_argument, made_checkpoint
from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.events import Finished
from qwen3_omni_neuron.options import RequestArguments
from qwen3_omni_neuron.prompt.messages import Messages
from testing.command_line import Figures, Row, parser_of, run
from testing.headlines import PLAYS, headline

TEXT_TOKENS, FRAMES = 24, 48
QUESTIONS = (
    "What colour is the sky?",
    "Who are you?",
    "Count to three, please.",
    "Why is that so?",
)
SPEAKERS = ("Ethan", "Chelsie", "Aiden")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("concurrency", __doc__)
    add_size_argument(parser)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--placement", default="shared")
    return run("concurrency", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Send the same requests in both ways, in turn: a row for each round. Times in seconds."""
    limits: RequestArguments = {
        "thinker_max_new_tokens": TEXT_TOKENS,
        "talker_max_new_tokens": FRAMES + 1,
        "runaway_speech": "keep",
    }
    requests: list[tuple[Messages, RequestArguments]] = [
        (
            [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            {"speaker": SPEAKERS[number % len(SPEAKERS)], "seed": number, **limits},
        )
        for number in range(options.requests)
    ]
    with (
        made_checkpoint(options.size) as checkpoint,
        Qwen3Omni.load(
            checkpoint,
            max_concurrency=options.requests,
            placement=options.placement,
            reuse=False,  # the same requests are repeated
        ) as omni,
    ):

        def one_by_one(**more: Any) -> list[SpeechResult]:
            return [omni.generate_audio(m, **settings, **more) for m, settings in requests]

        def at_once(**more: Any) -> list[SpeechResult]:
            streams = [omni.stream(m, **settings, **more) for m, settings in requests]
            return [
                next(event.result for event in stream if isinstance(event, Finished))
                for stream in streams
            ]

        for alone, together in zip(one_by_one(**GREEDY), at_once(**GREEDY), strict=True):
            assert alone.token_ids == together.token_ids, "text differs"
            assert alone.codes.tolist() == together.codes.tolist(), "codes differ"
        seconds = in_turn((one_by_one, at_once), options.rounds)
        results = at_once()
    names = ("one_by_one_s", "at_once_s")
    rows: list[Row] = [dict(zip(names, both, strict=True)) for both in zip(*seconds, strict=True)]
    medians = dict(zip(names, map(statistics.median, seconds), strict=True))
    ratios = [row["at_once_s"] / row["one_by_one_s"] for row in rows]
    first_s = [result.timings.ttfb_s for result in results]
    summary = {
        "frames": sum(len(result.codes) for result in results),
        **medians,
        "ratio": medians["at_once_s"] / medians["one_by_one_s"],
        "ttfb_s_at_once": first_s,
    }
    headlines = [
        headline("TTFB", first_s, "s"),
        headline("RTF", [result.timings.rtf for result in results], "", PLAYS),
        headline("at once / in turn", ratios),
    ]
    return rows, summary, headlines


if __name__ == "__main__":
    sys.exit(main())
