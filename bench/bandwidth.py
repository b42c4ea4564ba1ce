"""Decode beside the memory bandwidth of the machine, and prefill beside its arithmetic.

    python -m bench.bandwidth --size wide --dtype mixed --dtype int8 --json bandwidth.json
    python -m bench.bandwidth --size wide --dtype int8 --dtype mixed

Measures the machine, before each loading of the model, with as many threads as the model has and
with one:

- triad: a = b + s * c over arrays of float32, 12 bytes an element;
- read: the sum of such an array, 4 bytes an element: weights, too, are only read;
- product: a product of square matrices in float32 (testing/rates.py).

Then the stages: thinker prefill, and thinker decode after the prompt, by prompt length; talker step
and code predictor after the first prompt. One slot. What a call has to read and to multiply follows
from the config (testing/call_cost.py): one row reads the experts that it chose, a prompt all those
that it can have chosen, the code predictor its layers once a step, 15 times a frame.

A row has, with null for what does not apply:

- stage, dtype, threads; rows: of the prompt, or in the KV cache before the first timed step (one
  more for each repeat);
- median_s, min_s, max_s, repeats; bytes: read and written, weight_bytes of them weights;
  multiply_adds;
- a ratio to triad, to read and to product: the fastest call over what its bytes, or its
  multiply-adds, take at the best rate that was measured with as many threads;
- fits_l3: the weights fit the level-3 cache, so that a ratio says nothing about memory.

The summary has the rates, the ratios, and how many times faster than the first dtype each other is.
Fastest calls are compared, because other processes take bandwidth from both sides.
"""

import argparse
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import stages
from bench.common.measure import median_row, repeated
from bench.common.models import add_size_argument, loaded_engines, made_checkpoint
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models, lay_out
from qwen3_omni_neuron.cli import model_arguments
from qwen3_omni_neuron.compilation.plan import SAME
from qwen3_omni_neuron.cpu.precision import PRECISIONS
from qwen3_omni_neuron.cpu.target import CPU
from qwen3_omni_neuron.model.config import OmniConfig
from testing.call_cost import Work, work_of
from testing.command_line import Figures, Row, natural, parser_of, positive, run, sizes
from testing.headlines import Headline, headline
from testing.prompts import prompt_of
from testing.rates import one_thread_each, products, reads

PREFILL, DECODE = "thinker prefill", "thinker decode"
STEP, PREDICTOR = "talker step", "code predictor"
# What each of the machine's figures counts.
MACHINE = {"triad": "bytes", "read": "bytes", "product": "multiply_adds"}
TIMES = ("median_s", "min_s", "max_s", "repeats")
WORK = ("bytes", "weight_bytes", "multiply_adds")
RATIOS = tuple(f"{name}_ratio" for name in MACHINE)
COLUMNS = ("stage", "dtype", "threads", "rows", *TIMES, *WORK, *RATIOS, "fits_l3")
L3_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
BYTE_TOKENS = 256  # the first tokens of every vocabulary, none of them special


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("bandwidth", __doc__)
    model_arguments.add_checkpoint_argument(parser, "--size")
    add_size_argument(parser, "without --model: ")
    parser.add_argument(
        "--dtype",
        action="append",
        choices=list(PRECISIONS),
        help="several times for several; mixed",
    )
    parser.add_argument("--threads", type=sizes, default=[os.cpu_count() or 1])
    parser.add_argument("--prompts", type=sizes, default=[128, 512, 2048], help="rows of prompts")
    parser.add_argument("--array-mb", type=positive, default=256, help="each array of the triad")
    parser.add_argument("--product-size", type=positive, default=2048, help="rows of the product")
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--seed", type=natural, default=0)
    return run("bandwidth", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure the machine and the stages for every dtype and number of threads."""
    if options.model:
        rows = rows_of(resolve_checkpoint(options.model), options)
    else:
        with made_checkpoint(options.size) as checkpoint:
            rows = rows_of(checkpoint, options)
    return rows, summary_of(rows), headlines_of(rows)


def headlines_of(rows: Sequence[Row]) -> list[Headline]:
    """Return what decode takes over the memory's limit, and a prompt over the arithmetic's."""

    def ratios(ratio: str, *stages: str) -> list[float]:
        return [row[ratio] for row in rows if row["stage"] in stages]

    best = "1 is the machine's own rate"
    return [
        headline("decode and step", ratios("read_ratio", DECODE, STEP), "", best),
        headline("code predictor", ratios("read_ratio", PREDICTOR), "", best),
        headline("prefill", ratios("product_ratio", PREFILL), "", best),
    ]


def rows_of(folder: Path, options: argparse.Namespace) -> list[Row]:
    """Return every row, with its ratios."""
    config = read_config(folder)
    models, _ = lay_out(config, ("thinker", "talker"))
    rows: list[Row] = []
    for dtype in options.dtype or ["mixed"]:
        for threads in options.threads:
            for some in sorted({1, threads}):
                rows += machine_rows(some, options)
            for row in stage_rows(folder, config, dtype, threads, options):
                rows.append(with_work(row, work_of_row(models, config, row)))
    return [with_ratios(row, rows) for row in rows]


def machine_rows(threads: int, options: argparse.Namespace) -> Iterator[Row]:
    """Measure bandwidth and multiply-adds with `threads` threads."""
    elements = options.array_mb * 2**20 // 4 // threads  # in each thread's arrays
    arrays = [[torch.ones(elements) for _ in range(3)] for _ in range(threads)]
    triads = [partial(torch.add, b, c, alpha=0.5, out=a) for a, b, c in arrays]
    for stage, calls, each in (("triad", triads, 12), ("read", reads(threads, elements), 4)):
        with one_thread_each(calls) as call:
            times = repeated(call, options.repeats)
        yield row_of(stage, threads, times, bytes=each * elements * threads)
    with products(threads, options.product_size) as calls:
        times = min((repeated(call, options.repeats) for call in calls), key=min)
    yield row_of("product", threads, times, multiply_adds=options.product_size**3)


def row_of(stage: str, threads: int, times: Sequence[float], **more: int) -> Row:
    """Return a row of the machine's figures; see the module's docstring."""
    row = dict.fromkeys(COLUMNS)
    return {**row, "stage": stage, "threads": threads, **median_row(times), **more}


def stage_rows(
    folder: Path, config: OmniConfig, dtype: str, threads: int, options: argparse.Namespace
) -> Iterator[Row]:
    """Load the model and time its stages, as bench.stages does, for prompts of several lengths."""
    generator = torch.Generator().manual_seed(options.seed)
    prompts = [
        prompt_of(torch.randint(BYTE_TOKENS, (rows,), generator=generator))
        for rows in options.prompts
    ]
    loading = Namespace(
        dtype=dtype,
        predictor_dtype="auto",
        threads=threads,
        placement="shared",
        compiled_path=None,
        instance=None,
        cores=None,
    )
    calls = Namespace(batches=[1], repeats=options.repeats, seed=options.seed)
    with loaded_engines(folder, loading, 1) as (_, engines):
        stages.check_room(engines, prompts, options.repeats)
        found = list(stages.thinker_rows(engines.thinker, prompts, calls))
        if engines.talker is not None:
            found += stages.talker_rows(engines.talker, config, prompts[:1], calls)
    for row in found:
        if row["stage"] in (PREFILL, DECODE, STEP, PREDICTOR):
            timed = {name: row[name] for name in ("stage", "rows", *TIMES)}
            yield {**dict.fromkeys(COLUMNS), "dtype": dtype, "threads": threads, **timed}


def work_of_row(models: Models, config: OmniConfig, row: Row) -> Work:
    """Count the work of a row's call."""
    stage, dtype, rows = row["stage"], row["dtype"], row["rows"]
    text, talker = config.thinker.text, config.talker
    if stage in (PREFILL, DECODE):
        assert models.thinker is not None
        new, before = (rows, 0) if stage == PREFILL else (1, rows)
        return work_of("thinker", models.thinker, text, dtype, new, before)
    assert talker is not None and models.talker is not None and models.code_predictor is not None
    if stage == STEP:
        return work_of("talker", models.talker, talker.text, dtype, 1, rows)
    # Of 16 rows the first two are one pass: see model.code_predictor.
    groups, module = talker.code_groups, models.code_predictor
    default = CPU.limits.predictor_dtypes.get(dtype, (SAME,))[0]
    numbers = dtype if default == SAME else default
    return work_of("code_predictor", module, talker.predictor, numbers, groups, passes=groups - 1)


def with_work(row: Row, work: Work) -> Row:
    """Return a stage's row with the work of its call."""
    cache = l3_bytes()
    return {
        **row,
        "bytes": work.weight_bytes + work.kv_bytes,
        "weight_bytes": work.weight_bytes,
        "multiply_adds": work.multiply_adds,
        "fits_l3": None if cache is None else work.distinct_bytes <= cache,
    }


def l3_bytes() -> int | None:
    """Return the size of the level-3 cache that Linux names, or None."""
    try:
        text = L3_SIZE.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text.removesuffix("K")) * 1024


def with_ratios(row: Row, rows: Sequence[Row]) -> Row:
    """Return a stage's row with its ratios to the machine's best rates; other rows unchanged."""
    if row["dtype"] is None:
        return row
    ratios = {
        f"{name}_ratio": row["min_s"] / row[what] * best_rate(rows, name, row["threads"])
        for name, what in MACHINE.items()
    }
    return {**row, **ratios}


def best_rate(rows: Sequence[Row], name: str, threads: int) -> float:
    """Return the most bytes, or multiply-adds, a second in rows of one of the machine's figures."""
    same = [row for row in rows if (row["stage"], row["threads"]) == (name, threads)]
    return max(float(row[MACHINE[name]] / row["min_s"]) for row in same)


def threads_text(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the machine's rates, each stage's ratios, and the gain of each further dtype."""
    summary: dict[str, Any] = {}
    for threads in dict.fromkeys(row["threads"] for row in rows):
        summary[threads_text(threads)] = {
            "triad_gigabytes_per_s": best_rate(rows, "triad", threads) / 1e9,
            "read_gigabytes_per_s": best_rate(rows, "read", threads) / 1e9,
            "product_billion_multiply_adds_per_s": best_rate(rows, "product", threads) / 1e9,
        }
    first: dict[tuple[str, int, int | None], Row] = {}
    for row in rows:
        if row["dtype"] is None:
            continue
        case = row["stage"], row["threads"], row["rows"]
        figures = {name: row[name] for name in ("min_s", *RATIOS)}
        same = first.setdefault(case, row)
        if same is not row:
            figures[f"times_faster_than_{same['dtype']}"] = same["min_s"] / row["min_s"]
        run = f"{row['dtype']}, {threads_text(row['threads'])}"
        size = "" if row["rows"] is None else f" {row['rows']}"
        summary.setdefault(run, {})[row["stage"] + size] = figures
    return summary


if __name__ == "__main__":
    sys.exit(main())
