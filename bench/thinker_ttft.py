"""Time to first token, and between tokens, of replies without speech by prompt length.

    python -m bench.thinker_ttft --model CHECKPOINT --lengths 128,512,2048 --json result.json

Written prompts of about each length (a row has the exact one), replies of exactly --text-tokens
tokens, since no token ends them, one request at a time, each with the next seed. TTFT: arrival of
the request, its conversation not yet read, to the first token. ITL: from there to the end, over the
tokens after the first. tokens_per_s: 1 / ITL; prompt_tokens_per_s: the prompt over TTFT.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from bench.common.models import (
    add_model_arguments,
    chosen_checkpoint,
    load_chosen,
    written_messages,
)
from qwen3_omni_neuron import Qwen3Omni
from testing.command_line import Figures, Row, natural, parser_of, positive, run, sizes
from testing.headlines import headline
from testing.metrics import distribution

NO_EOS = 2**31 - 1  # an id that is never generated
FIGURES = ("ttft_s", "itl_s", "total_s", "tokens_per_s", "prompt_tokens_per_s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("thinker_ttft", __doc__)
    add_model_arguments(parser)
    parser.add_argument("--lengths", type=sizes, default=[128, 512, 1024, 2048])
    parser.add_argument("--text-tokens", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--seed", type=natural, default=0)
    return run("thinker_ttft", parser, measure, arguments)


def measure(options: Namespace) -> Figures:
    """Measure every length; the summary has figures for each length."""
    with (
        chosen_checkpoint(options) as checkpoint,
        load_chosen(checkpoint, options, slots=1) as omni,
    ):
        by_length = {length: rows_of(omni, length, options) for length in options.lengths}
    rows = [row for found in by_length.values() for row in found]
    headlines = [
        headline(f"TTFT, {length} tokens", [row["ttft_s"] for row in found], "s")
        for length, found in by_length.items()
    ]
    headlines.append(headline("a further token", [row["itl_s"] for row in rows], "s"))
    summary = {str(length): summary_of(found) for length, found in by_length.items()}
    return rows, summary, headlines


def rows_of(omni: Qwen3Omni, length: int, options: Namespace) -> list[Row]:
    """Return a row for each repeat, after a warm-up."""
    messages = written_messages(omni.prompt_builder, length)

    def row(seed: int) -> Row:
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


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the distributions of one length's figures."""
    figures = {name: distribution([row[name] for row in rows]) for name in FIGURES}
    return {"prompt_tokens": rows[0]["prompt_tokens"], **figures}


if __name__ == "__main__":
    sys.exit(main())
