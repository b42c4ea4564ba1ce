"""The released size on this machine: its tree, its memory, a reply, and each part beside its limit.

    python -m bench.released --json released.json
    python -m bench.released --size tiny --folder /tmp/some    # the same in seconds

Where --folder has no tree, it is compiled from random weights that are drawn by name.
The released size in int4 takes 23 GB of disk, eight minutes and 4 GB
of memory to compile, and 24 GB of memory to run: with less, the bench says so and stops.

Each of these is a process of its own:

- reply: the load, and a written question's reply of --tokens text tokens and --frames frames.
  Random weights never end a reply, so limits do;
- the same again, which is what counts: the tree's pages are in memory, and a short reply has filled
  the talker's rows of the text. Right before and after the reply the machine's rates are measured.
  At its end a prompt of --positions rows is prefilled, whose KV cache counts in the peak of the
  memory;
- question: the end of a spoken question of 3 s, prefilled while it arrives, to the first sample. A
  first one is not counted;
- parts: one call of each part; frames of talker and code predictor four times for each repeat.
  After each call memory is read, and a product of square matrices computed, with all threads: what
  a machine's neighbours leave of its rates changes from one moment to the next.

Rows, with null for what does not apply:

- stage: a part; rows: of its prompt, or in its KV cache; frames; median_s, min_s, max_s, repeats;
- bytes and multiply_adds of a call; read_bytes_per_s, product_multiply_adds_per_s: the medians of
  the rates after the part's calls, or after the frames that talker and code predictor share;
- limit_s: the bytes at the read's rate or the multiply-adds at the product's, whichever is longer;
  ratio: median_s over this limit with the threads that the part has, half of them for code2wav.
  Not the fastest of each: a read of some milliseconds finds moments that no whole call does.

The summary has rtf and parts_rtf: of the reply, and the sum of the limits of all calls that it
needs, one after the other and by all threads, by the duration of its audio: the mean of two sums,
by the rates before the reply and after it, which are there, too; ttfb_s and total_s; peak_mb,
mapped pages included; major_faults in the counted reply; long_prompt_ttft_s; tree_gb; load_s, of
the load call alone; first_load_s, first_total_s and first_major_faults, of the first process;
question_ttfb_s and question_ttft_s, and question_calls_s, the seconds of each engine's calls from
the end of the question to the first sample; first_sample_s, the limits of the reply's prompt, a
token, a frame, and code2wav of that frame.
"""

import itertools
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import bandwidth, stages
from bench.common.measure import in_new_process, timed
from bench.common.models import loaded_engines, written_messages
from bench.threads import code2wav_work
from qwen3_omni_neuron import AudioChunk, Qwen3Omni, SpeechResult
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.modules import STAGES, lay_out
from qwen3_omni_neuron.cli import main as command
from qwen3_omni_neuron.compilation.loading import stage_threads
from qwen3_omni_neuron.compilation.plan import make_plan, models_of
from qwen3_omni_neuron.cpu.memory import memory_bytes
from qwen3_omni_neuron.cpu.precision import PRECISIONS
from qwen3_omni_neuron.cpu.target import LIMITS, usable_cores
from qwen3_omni_neuron.cpu.weights import expected_bytes
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.model.config import OmniConfig
from testing.call_cost import CHUNK, FRAMES, PROMPT, TOKENS, CallSeconds
from testing.command_line import Figures, InputError, Row, natural, parser_of, positive, run
from testing.headlines import PLAYS, headline
from testing.memory import major_faults, peak_mb
from testing.observed import Recorder
from testing.prompts import prompt_of
from testing.rates import Call, one_thread_each, products, reads
from testing.tiny import write_tiny_checkpoint

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What does the sea say at night?"}]
CODE2WAV, OWN_PROMPT = "code2wav step", "the reply's prompt"
NEVER = 10**6  # id of no token
GB = 1e9
PROCESS_BYTES = 500_000_000  # Python, torch, the tokenizer, and the buffers of calls
DTYPES = tuple(name for name, precision in PRECISIONS.items() if precision.packed)
SPOKEN_S, PIECE_S, RATE = 3.0, 0.1, 16000
# Frames for each of --repeats: ten frames pass in a second, and a machine's neighbours stay longer.
FRAME_REPEATS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("released", __doc__)
    parser.add_argument("--folder", type=Path, default=Path(".venv/bench/released"))
    parser.add_argument("--size", default="released", help="of the weights that are drawn")
    parser.add_argument("--dtype", choices=DTYPES, default="int4")
    parser.add_argument("--threads", type=positive, default=usable_cores())
    parser.add_argument("--prompt", type=positive, default=PROMPT, help="rows before a timed step")
    parser.add_argument("--tokens", type=positive, default=TOKENS)
    parser.add_argument("--frames", type=positive, default=FRAMES)
    parser.add_argument("--positions", type=positive, default=4000, help="of a long prompt")
    parser.add_argument("--array-mb", type=positive, default=256, help="each array that is read")
    parser.add_argument("--product-size", type=positive, default=1536, help="rows of the product")
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--seed", type=natural, default=0)
    return run("released", parser, measure, arguments)


def measure(options: Namespace) -> Figures:
    """Make the tree where there is none, and measure. Raises InputError where it does not fit."""
    checkpoint, tree = made(options)
    first = in_new_process(reply, checkpoint, tree, options, False)
    replied = in_new_process(reply, checkpoint, tree, options, True)
    asked = in_new_process(question, checkpoint, tree, options)
    timed_parts = in_new_process(parts, checkpoint, tree, options)
    config, dtype = read_config(checkpoint), options.dtype
    prompt = prompt_row(config, timed_parts[0], replied["prompt_tokens"], dtype)
    sums = [
        derived(
            [with_limit({**row, **rates}, options.threads) for row in (prompt, *timed_parts)],
            options,
            replied["audio_s"],
        )
        for rates in (replied["rates_before"], replied["rates_after"])
    ]
    rows = [with_limit(row, options.threads) for row in timed_parts]
    size = sum(file.stat().st_size for file in tree.rglob("*") if file.is_file())
    summary = {
        "first_load_s": first["load_s"],
        "first_total_s": first["total_s"],
        "first_major_faults": first["major_faults"],
        **replied,
        **{name: statistics.mean(found[name] for found in sums) for name in sums[0]},
        "tree_gb": size / GB,
        **asked,
    }
    headlines = [
        headline("TTFT", [summary["question_ttft_s"]], "s"),
        headline("TTFB", [summary["question_ttfb_s"]], "s", "goal 3 s after a spoken question"),
        headline("RTF", [summary["rtf"]], "", PLAYS),
    ]
    return rows, summary, headlines


def made(options: Namespace) -> tuple[Path, Path]:
    """Return the checkpoint's folder and the tree's, which is compiled where it is not complete."""
    checkpoint, tree = options.folder / f"{options.size}", options.folder / options.dtype
    write_tiny_checkpoint(checkpoint, size=options.size, drawn=True)
    config = read_config(checkpoint)
    plan = make_plan(checkpoint, config, LIMITS, dtype=options.dtype)
    needed = PROCESS_BYTES + sum(expected_bytes(plan, model) for model in models_of(config))
    if needed > memory_bytes():
        raise InputError(
            f"{options.size} in {options.dtype} takes {needed / GB:.1f} GB of memory, and this "
            f"machine has {memory_bytes() / GB:.1f}."
        )
    words = ["--target", "cpu", "--dtype", options.dtype, "--max-concurrency", "1"]
    with redirect_stdout(sys.stderr):
        failed = command(["compile", "--model", str(checkpoint), "--out", str(tree), *words])
    if failed:
        raise InputError("the tree was not compiled: see above.")
    return checkpoint, tree


class Machine:
    """Calls that are timed in turn with those of a part.

    calls: by the name of a rate, what one call reads or multiplies, and calls of which the fastest
    counts.
    """

    def __init__(self, calls: Mapping[str, tuple[int, Sequence[Call]]]):
        self._calls = calls
        self._seconds: dict[str, list[float]] = {name: [] for name in calls}
        self._rates: dict[str, float] = {}

    def __call__(self) -> None:
        """Make each call once."""
        for name, (_, calls) in self._calls.items():
            self._seconds[name].append(min(map(timed, calls)))

    def rates(self) -> dict[str, float]:
        """Return the medians since they were last asked for; the same where nothing was timed."""
        for name, seconds in self._seconds.items():
            if seconds:
                self._rates[name] = self._calls[name][0] / statistics.median(seconds)
                seconds.clear()
        return dict(self._rates)

    def rates_of(self, repeats: int) -> dict[str, float]:
        """Make each call so many times; return the medians."""
        for _ in range(repeats):
            self()
        return self.rates()


@contextmanager
def machine(options: Namespace) -> Iterator[Machine]:
    """Make reads and products with all threads."""
    elements = options.array_mb * 2**20 // 4 // options.threads
    with (
        one_thread_each(reads(options.threads, elements)) as read,
        products(options.threads, options.product_size) as multiplied,
    ):
        yield Machine(
            {
                "read_bytes_per_s": (4 * elements * options.threads, [read]),
                "product_multiply_adds_per_s": (options.product_size**3, multiplied),
            }
        )


def loaded(
    checkpoint: Path,
    tree: Path,
    options: Namespace,
    wrap_engines: Callable[[Engines], Engines] | None = None,
) -> Qwen3Omni:
    """Load the tree with one slot."""
    return Qwen3Omni.load(
        checkpoint,
        compiled_path=tree,
        dtype=options.dtype,
        threads=options.threads,
        wrap_engines=wrap_engines,
    )


def limits(options: Namespace) -> dict[str, Any]:
    """Return options of a reply with the wanted numbers of tokens and frames."""
    return {
        "thinker_eos_token_id": NEVER,
        "thinker_max_new_tokens": options.tokens,
        "talker_max_new_tokens": options.frames + 1,  # with the code that ends speech
        "runaway_speech": "keep",
        "seed": options.seed,
    }


def reply(checkpoint: Path, tree: Path, options: Namespace, warm: bool) -> dict[str, Any]:
    """Load and reply. warm: after a short reply, and with a long prompt at the end."""
    start_s = time.perf_counter()
    omni = loaded(checkpoint, tree, options)
    load_s = time.perf_counter() - start_s
    prefill_s = None
    with omni:
        if warm:
            omni.generate_audio(QUESTION, **{**limits(options), "talker_max_new_tokens": 3})
        result, about = counted_reply(omni, options)
        if warm:
            long = written_messages(omni.prompt_builder, options.positions)
            few = {"thinker_max_new_tokens": 2, "talker_max_new_tokens": 3}
            prefill_s = omni.generate_audio(long, **{**limits(options), **few}).timings.ttft_s
    times = result.timings
    if (times.text_tokens, times.frames) != (options.tokens, options.frames):
        raise InputError(
            f"the reply has {times.text_tokens} tokens and {times.frames} frames, and "
            f"{options.tokens} and {options.frames} were wanted. Take another --seed."
        )
    return {
        "load_s": load_s,
        "rtf": times.rtf,
        "ttft_s": times.ttft_s,
        "ttfb_s": times.ttfb_s,
        "total_s": times.total_s,
        "audio_s": times.audio_s,
        "stages_s": dict(times.speech_s),
        "prompt_tokens": times.prompt_tokens,
        "long_prompt_ttft_s": prefill_s,
        "peak_mb": peak_mb(),
        **about,
    }


def counted_reply(omni: Qwen3Omni, options: Namespace) -> tuple[SpeechResult, dict[str, Any]]:
    """Reply. Returns the pages that it waited for, too, and the rates before it and after it."""
    with machine(options) as beside:
        before = beside.rates_of(options.repeats)
        pages = major_faults()
        result = omni.generate_audio(QUESTION, cache_key="new", **limits(options))
        pages = major_faults() - pages
        after = beside.rates_of(options.repeats)
    return result, {"major_faults": pages, "rates_before": before, "rates_after": after}


def question(checkpoint: Path, tree: Path, options: Namespace) -> dict[str, Any]:
    """Ask twice in sound that arrives as it is spoken; return the times of the second answer."""
    draw, found = np.random.default_rng(options.seed), dict[str, Any]()
    recorder = Recorder()
    with loaded(checkpoint, tree, options, recorder.wrap) as omni:
        for _ in range(2):
            samples = draw.normal(0, 0.1, int(SPOKEN_S * RATE)).astype(np.float32)
            pieces = np.array_split(samples, round(SPOKEN_S / PIECE_S))
            with omni.session(first_chunk="early", **limits(options)) as session:
                for piece in pieces:
                    session.append_audio(piece, RATE)
                    time.sleep(PIECE_S)
                start_s = time.perf_counter()
                text_s = 0.0
                for event in session.respond():
                    text_s = text_s or time.perf_counter() - start_s
                    if isinstance(event, AudioChunk):
                        break
                ttfb_s = time.perf_counter() - start_s
                calls_s = recorder.seconds(start_s, start_s + ttfb_s)
                found = {"question_ttft_s": text_s, "question_ttfb_s": ttfb_s}
                found["question_calls_s"] = calls_s
    return found


def parts(checkpoint: Path, tree: Path, options: Namespace) -> list[Row]:
    """Time one call of each part, and count its work."""
    config = read_config(checkpoint)
    generator = torch.Generator().manual_seed(options.seed)
    prompt = prompt_of(torch.randint(bandwidth.BYTE_TOKENS, (options.prompt,), generator=generator))
    loading = Namespace(
        **{"dtype": options.dtype, "threads": options.threads, "compiled_path": tree},
        **{"placement": "shared", "instance": None, "cores": None},
        predictor_dtype="auto",
    )
    calls = Namespace(
        batches=[1], repeats=options.repeats, seed=options.seed, chunk_frames=[1, CHUNK]
    )
    frames = Namespace(**{**vars(calls), "repeats": FRAME_REPEATS * options.repeats})
    with loaded_engines(checkpoint, loading, 1) as (_, engines), machine(options) as beside:
        assert engines.talker is not None and engines.vocoder is not None
        timed_rows = itertools.chain(
            stages.thinker_rows(engines.thinker, [prompt], calls, beside),
            stages.talker_rows(engines.talker, config, [prompt], frames, beside),
            stages.vocoder_rows(engines.vocoder, config, calls, beside),
        )
        found = [{**row, **beside.rates()} for row in timed_rows]
    models, _ = lay_out(config, ("thinker", "talker"))
    kept = (bandwidth.PREFILL, bandwidth.DECODE, bandwidth.STEP, bandwidth.PREDICTOR)
    rows = []
    for row in found:
        if row["stage"] in kept:
            work = bandwidth.work_of_row(models, config, {**row, "dtype": options.dtype})
            nbytes, adds = work.weight_bytes + work.kv_bytes, work.multiply_adds
        elif row["stage"] == CODE2WAV:
            adds, nbytes = code2wav_work(config, row["frames"])
        else:
            continue
        rows.append({**row, "bytes": nbytes, "multiply_adds": adds})
    return rows


def with_limit(row: Row, threads: int) -> Row:
    """Return a part's row with its limit by the machine's rates."""
    bytes_s = row["bytes"] / row["read_bytes_per_s"]
    adds_s = row["multiply_adds"] / row["product_multiply_adds_per_s"]
    limit_s = max(bytes_s, adds_s)
    stage = "vocoder" if row["stage"] == CODE2WAV else "thinker"
    own = stage_threads(threads, STAGES, "shared")[stage]
    ratio = row["median_s"] / max(bytes_s, adds_s * threads / own)
    return {**row, "limit_s": limit_s, "ratio": ratio}


def prompt_row(config: OmniConfig, prefill: Row, rows: int, dtype: str) -> Row:
    """Return the row of the reply's own prompt, which was not timed, from that of a prefill."""
    models, _ = lay_out(config, ("thinker",))
    work = bandwidth.work_of_row(models, config, {**prefill, "dtype": dtype, "rows": rows})
    counted = {"bytes": work.weight_bytes + work.kv_bytes, "multiply_adds": work.multiply_adds}
    return {**prefill, **counted, "stage": OWN_PROMPT}


def derived(rows: Sequence[Row], options: Namespace, audio_s: float) -> dict[str, float]:
    """Return what the limits of the parts add up to; see the beginning of this file."""
    limit = {(row["stage"], row["frames"]): row["limit_s"] for row in rows}
    calls = CallSeconds(
        limit[OWN_PROMPT, None],
        limit[bandwidth.DECODE, None],
        limit[bandwidth.STEP, 1],
        limit[bandwidth.PREDICTOR, 1],
        limit[CODE2WAV, CHUNK],
    )
    first = calls.prefill + calls.token + calls.talker + calls.predictor
    return {
        "parts_rtf": calls.reply(options.tokens, options.frames) / audio_s,
        "first_sample_s": first + limit[CODE2WAV, 1],
    }


if __name__ == "__main__":
    sys.exit(main())
