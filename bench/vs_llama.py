"""The thinker's widths in llama.cpp (q4_0) and in ours (int4): prompts, steps, four requests.

    python -m venv .venv-llama; .venv-llama/bin/pip install llama-cpp-python gguf
    python -m bench.vs_llama --threads 1 --json result.json

Layers of the released widths and lm_head, random weights on both sides: llama.cpp's are a GGUF
that this script writes (1 GB for two layers). lm_head is q4_0 there and int8 in ours. Both
processes take turns. A row has side, call, size (rows of a prompt, or requests of a step after 128
rows each), seconds, and CPU seconds of its process. The summary has the medians, and llama.cpp's
over ours.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.peers.llama import ROWS
from bench.threads import fill_packed
from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.model.kv_cache import KvCache
from testing.command_line import Figures, InputError, Row, parser_of, positive, run, sizes
from testing.headlines import headline
from testing.released import of_depth

ROOT = Path(__file__).parents[1]
Call = Callable[[str, int], tuple[float, float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("vs_llama", __doc__)
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--prompts", type=sizes, default=[128, 512], help="rows, at most 512")
    parser.add_argument("--requests", type=sizes, default=[1, 4])
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-llama")
    return run("vs_llama", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Call both sides in turn."""
    calls = [("prefill", rows) for rows in options.prompts]
    calls += [("decode", requests) for requests in options.requests]
    rows: list[Row] = []
    with torch.no_grad(), llama_of(options) as (version, llama):
        sides = {"ours": ours_of(options), "llama.cpp": llama}
        for number in range(1 + options.repeats):
            for call, size in calls:
                for side, timed in sides.items():
                    took_s, cpu_s = timed(call, size)
                    if number > 0:  # the first round warms up
                        row = {"side": side, "call": call, "size": size}
                        rows.append({**row, "took_s": took_s, "cpu_s": cpu_s})
    summary: Row = {"llama_cpp_python_version": version}
    lines = []
    for call, size in calls:
        of = {
            s: [r for r in rows if (r["side"], r["call"], r["size"]) == (s, call, size)]
            for s in sides
        }
        found = {s: {k: median(r[k] for r in of[s]) for k in ("took_s", "cpu_s")} for s in sides}
        ratios = {k: found["llama.cpp"][k] / found["ours"][k] for k in ("took_s", "cpu_s")}
        summary[f"{call} {size}"] = {**found, "ratios": ratios}
        note = f"llama.cpp takes {ratios['took_s']:.3g} times as long"
        lines.append(headline(f"{call} {size}", [r["took_s"] for r in of["ours"]], "s", note))
    return rows, summary, lines


def ours_of(options: argparse.Namespace) -> Call:
    """Return a timed call of the thinker in C, over random weights."""
    from qwen3_omni_neuron.cpu.native.steps import NativeSteps

    library = find_library()
    if library is None:
        raise InputError("the C library was not compiled.")
    library.grow_pool(options.threads)
    config = of_depth(options.layers)
    c, thinker = config.thinker.text, lay_out(config, ("thinker",))[0].thinker
    assert thinker is not None
    fill_packed(thinker, "thinker", "int4")
    cache = KvCache.zeros(c, 1 + max(options.requests), 1024, torch.float32)
    steps = NativeSteps(c, thinker, cache, library, options.threads)
    ids = np.random.default_rng(1).integers(0, c.vocab_size, 1024)

    def prefill(slot: int, rows: int) -> None:
        positions = np.tile(np.arange(rows, dtype=np.float32), (3, 1))
        steps.prefill_ids(slot, 0, ids[slot : slot + rows], positions)

    def decode(requests: int) -> None:
        slots = range(1, 1 + requests)
        inputs = [int(ids[slot + ROWS]) for slot in slots]
        steps.decode(slots, [ROWS] * requests, [float(ROWS)] * requests, inputs)

    def timed(call: str, size: int) -> tuple[float, float]:
        start_s, cpu_s = time.perf_counter(), time.process_time()
        prefill(0, size) if call == "prefill" else decode(size)
        return time.perf_counter() - start_s, time.process_time() - cpu_s

    for slot in range(1, 1 + max(options.requests)):
        prefill(slot, ROWS)
    return timed


@contextmanager
def llama_of(options: argparse.Namespace) -> Iterator[tuple[str, Call]]:
    """Yield the version of llama-cpp-python, and a timed call of a process that has loaded it."""
    config = asdict(of_depth(options.layers).thinker.text)
    command = [options.environment.absolute() / "bin" / "python", "-m", "bench.peers.llama"]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=null, text=True, cwd=ROOT
        ) as process,
    ):

        def ask(line: str) -> str:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            if not (answer := process.stdout.readline()):
                raise InputError(f"{command[0]} -m bench.peers.llama ended without an answer.")
            return answer

        def timed(call: str, size: int) -> tuple[float, float]:
            took_s, cpu_s = json.loads(ask(f"{call} {size}"))
            return took_s, cpu_s

        job = {"path": f"{folder}/thinker.gguf", "config": config, "threads": options.threads}
        yield ask(json.dumps({**job, "requests": max(options.requests)})).strip(), timed
        process.communicate()


if __name__ == "__main__":
    sys.exit(main())
