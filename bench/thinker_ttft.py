"""Time to first token and the pace of the text, without speech, by prompt length.

    python -m bench.thinker_ttft --model CHECKPOINT --lengths 128,512,2048 --json result.json

Written prompts of about each length (a row has the true one), replies of --text-tokens tokens
whatever the model would say, one request at a time, seeds counted up. TTFT: arrival of the request,
its conversation not yet read, to the first token. ITL: from there to the end, over the tokens after
the first. tokens_per_s: 1 / ITL; prompt_tokens_per_s: the prompt over TTFT.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.arguments import natural, positive, sizes
from bench.common.long_prompts import written_messages
from bench.common.metrics import distribution
from bench.common.model_choice import add_model_arguments, chosen_checkpoint, load_chosen
from bench.common.results import publish, results_of
from qwen3_omni_neuron import Qwen3Omni, Qwen3OmniError

NO_EOS = 2**31 - 1  # an id that is never written
FIGURES = ("ttft_s", "itl_s", "total_s", "tokens_per_s", "prompt_tokens_per_s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where nothing could be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    parser.add_argument("--lengths", type=sizes, default=[128, 512, 1024, 2048])
    parser.add_argument("--text-tokens", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--json", type=Path, help="write the result here, too")
    options = parser.parse_args(arguments)
    try:
        with (
            chosen_checkpoint(options) as checkpoint,
            load_chosen(checkpoint, options, slots=1) as omni,
        ):
            rows = [row for length in options.lengths for row in measure(omni, length, options)]
    except (Qwen3OmniError, ValueError) as error:
        print(f"thinker_ttft.py: {error}", file=sys.stderr)
        return 1
    summary = {str(length): summary_of(rows, length) for length in options.lengths}
    publish(results_of("thinker_ttft", arguments, options, rows, summary), options.json)
    return 0


def measure(omni: Qwen3Omni, length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a repeat, after one that warms up."""
    messages = written_messages(omni.conversation, length)

    def row(seed: int) -> dict[str, Any]:
        timings = omni.generate_text(
            messages,
            seed=seed,
            thinker_max_new_tokens=options.text_tokens,
            thinker_eos_token_id=NO_EOS,
        ).timings
        after_first = timings.text_tokens - 1
        itl_s = (timings.total_s - timings.ttft_s) / after_first if after_first else None
        return {
            "length": length,
            "prompt_tokens": timings.prompt_tokens,
            "seed": seed,
            "text_tokens": timings.text_tokens,
            "ttft_s": timings.ttft_s,
            "itl_s": itl_s,
            "total_s": timings.total_s,
            "tokens_per_s": None if itl_s is None else 1 / itl_s,
            "prompt_tokens_per_s": timings.prompt_tokens / timings.ttft_s,
        }

    row(options.seed)
    return [row(options.seed + number) for number in range(options.repeats)]


def summary_of(rows: Sequence[dict[str, Any]], length: int) -> dict[str, Any]:
    """Distributions of the figures at one length."""
    ours = [row for row in rows if row["length"] == length]
    figures = {name: distribution([row[name] for row in ours]) for name in FIGURES}
    return {"prompt_tokens": ours[0]["prompt_tokens"], **figures}


if __name__ == "__main__":
    sys.exit(main())
