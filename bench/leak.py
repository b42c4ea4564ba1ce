"""Memory that rounds of load, speak and close leave behind, and replies right after a load.

    python -m bench.leak --rounds 20 --json result.json

All rounds are in one process, each in a thread of its own, as a server loads. A row is a round:
seconds of the load and of each reply to the same spoken question, then what the process holds when
the model is closed. The first two rounds don't count: libraries allocate what they keep. With
--at-once, so many replies at a time follow those that are timed: malloc then has more to keep.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.models import load_chosen
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cli.model_arguments import add_model_arguments, model_or_shipped
from testing.command_line import Figures, Row, parser_of, positive, run
from testing.headlines import headline
from testing.memory import allocated_mb, live_tensor_bytes, open_files, resident_mb

QUESTION = Path(__file__).parents[1] / "examples" / "sum.wav"
REPLIES = ("first_s", "second_s", "third_s")
WARM_UP = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("leak", __doc__)
    add_model_arguments(parser, "the small one that ships with the package")
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument(
        "--max-frames", type=positive, default=40, help="most frames of a reply; default: 40"
    )
    parser.add_argument("--at-once", type=positive, default=1, help="replies at a time; default: 1")
    return run("leak", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Run the rounds. Growth is from the end of the second round to the end of the last."""
    rows: list[Row] = []
    for _ in range(options.rounds):
        with ThreadPoolExecutor(1) as thread:
            rows.append(thread.submit(one_round, options).result())
    start = rows[min(WARM_UP, len(rows)) - 1]
    summary: dict[str, Any] = {
        f"grown_{name}": rows[-1][name] - start[name]
        for name in ("resident_mb", "allocated_mb", "tensors_mb", "threads", "open_files")
        if start[name] is not None
    }
    for name in ("load_s", *REPLIES):
        summary[name] = statistics.median(row[name] for row in rows)
    summary["first_over_third"] = summary["first_s"] / summary["third_s"]
    summary = {"resident_mb": rows[-1]["resident_mb"], **summary}
    headlines = [
        headline("memory grown", [summary.get("grown_resident_mb")], "MB", "goal 0"),
        headline("threads grown", [summary["grown_threads"]], "", "goal 0"),
        headline("first reply / third", [summary["first_over_third"]]),
    ]
    return rows, summary, headlines


def one_round(options: argparse.Namespace) -> Row:
    """Load, speak three times, close; return the times and the memory and files left."""
    start = time.perf_counter()
    times: Row = {}
    with load_chosen(model_or_shipped(options), options, slots=options.at_once) as omni:
        times["load_s"] = time.perf_counter() - start
        for name in REPLIES:
            start = time.perf_counter()
            reply(omni, options)
            times[name] = time.perf_counter() - start
        if options.at_once > 1:
            with ThreadPoolExecutor(options.at_once) as threads:
                list(threads.map(partial(reply, omni, options), range(options.at_once)))
    del omni
    tensors_mb = live_tensor_bytes() / 2**20  # collects garbage before the rest is counted
    return {
        **times,
        "resident_mb": resident_mb(),
        "allocated_mb": allocated_mb(),
        "tensors_mb": tensors_mb,
        "threads": threading.active_count(),
        "open_files": open_files(),
    }


def reply(omni: Qwen3Omni, options: argparse.Namespace, seed: int = 0) -> None:
    """Ask the question."""
    content = [{"type": "audio", "audio": str(QUESTION)}]
    messages = [{"role": "user", "content": content}]
    omni.generate_audio(messages, seed=seed, talker_max_new_tokens=options.max_frames + 1)


if __name__ == "__main__":
    sys.exit(main())
