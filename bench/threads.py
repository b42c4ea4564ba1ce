"""Code2wav, the encoders and prompts by number of threads, beside the limits of the machine.

    python -m bench.threads --threads 1,2,4 --json threads.json

Over random weights of the released sizes, or of those of --model's config.json: nothing else of a
checkpoint is read. The parts are those that `load` runs in C, in a pool of as many threads as this
process may use cores, as there; encoders and prompts in each --dtype. All numbers of
threads take turns, with each other and with products of square matrices, at most a thread a core;
what the machine reads (bench.bandwidth) is measured before and after a part.

A row has:

- part: code2wav, of a stream that goes on; audio encoder, vision encoder and thinker prefill with
  their dtype, the last of one layer without lm_head;
- size: frames of 80 ms, seconds of audio, patches of an image, or rows of a prompt;
- threads; median_s, min_s, max_s, repeats; product_multiply_adds_per_s, of the fastest product;
- multiply_adds: those of the torch module; weight_bytes: as kept, each weight once, tables of rows
  and experts that have no row left out;
- limit_s: what the multiply-adds take at the product's rate, or the weights at the read's best,
  whichever is longer; ratio: min_s over it; product_ratio: min_s over what the multiply-adds take.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.bandwidth import best_rate, machine_rows
from bench.common.measure import in_turn, median_row
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.precision import weight_form
from qwen3_omni_neuron.cpu.target import usable_cores
from qwen3_omni_neuron.cpu.weights import put_kept
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import KvCache
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder, patch_places
from testing.call_cost import kept_bytes, precision_of, work_of
from testing.command_line import Figures, InputError, Row, parser_of, positive, run, sizes
from testing.headlines import headline
from testing.rates import products
from testing.released import RELEASED

DTYPES = ("mixed", "int8", "int4")
Call = Callable[[], Any]
Module = TypeVar("Module", bound=nn.Module)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("threads", __doc__)
    parser.add_argument("--model", type=Path, help="folder of a config.json; default: released")
    parser.add_argument("--threads", type=sizes, default=[1, 2, 4])
    parser.add_argument("--frames", type=sizes, default=[1, 4, 12, 25], help="of code2wav")
    parser.add_argument("--audio-seconds", type=sizes, default=[8])
    parser.add_argument("--pictures", type=sizes, default=[16], help="patches along a side, even")
    parser.add_argument("--prompts", type=sizes, default=[128, 512], help="rows of prompts")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="all; not of code2wav")
    parser.add_argument("--array-mb", type=positive, default=256, help="each array that is read")
    parser.add_argument("--product-size", type=positive, default=1536, help="rows of the product")
    parser.add_argument("--repeats", type=positive, default=10)
    return run("threads", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure every part. The summary has the ratios by part, size and threads."""
    library = find_library()
    if library is None:
        raise InputError("the C library was not compiled, and the parts are computed in it.")
    library.grow_pool(min(max(options.threads), usable_cores()))
    config = RELEASED if options.model is None else read_config(options.model)
    rows: list[Row] = []
    with torch.no_grad():
        for part in (code2wav_rows, audio_rows, vision_rows, prefill_rows):
            rows += part_rows(part(config, library, options), options)
    summary: dict[str, Any] = {}
    for row in rows:
        case = summary.setdefault(f"{row['part']} {row['size']}", {})
        case[f"threads {row['threads']}"] = {k: row[k] for k in ("min_s", "ratio", "product_ratio")}
    parts = dict.fromkeys(row["part"] for row in rows)
    headlines = [
        headline(f"{part} over its limit", [row["ratio"] for row in rows if row["part"] == part])
        for part in parts
    ]
    return rows, summary, headlines


def part_rows(parts: Iterator[Row], options: argparse.Namespace) -> list[Row]:
    """Add limits and ratios to the rows of a part, by what is read before and after it."""
    counts = sorted({bounded(threads) for threads in options.threads})
    machine = [row for count in counts for row in machine_rows(count, options)]
    rows = list(parts)
    machine += [row for count in counts for row in machine_rows(count, options)]
    for row in rows:
        product_s = row["multiply_adds"] / row["product_multiply_adds_per_s"]
        read_s = row["weight_bytes"] / best_rate(machine, "read", bounded(row["threads"]))
        row["limit_s"] = max(product_s, read_s)
        row["ratio"] = row["min_s"] / row["limit_s"]
        row["product_ratio"] = row["min_s"] / product_s
    return rows


def bounded(threads: int) -> int:
    """Return how many of so many threads work at a time."""
    return min(threads, usable_cores())


def timed_rows(
    part: str, size: int, calls: Sequence[Call], work: tuple[int, int], options: argparse.Namespace
) -> Iterator[Row]:
    """Time the calls of one size, one for each number of threads, in turn with products.

    The rate of a machine changes from one minute to the next.
    """
    counts = sorted({bounded(threads) for threads in options.threads})
    with products(max(counts), options.product_size) as multiplied:
        kinds = [(count, call) for count in counts for call in multiplied]
        every: list[Call] = [*calls, *(partial(on_threads, *kind) for kind in kinds)]
        times = [seconds[1:] for seconds in in_turn(every, 1 + options.repeats)]
    of_products = times[len(calls) :]
    for threads, seconds in zip(options.threads, times, strict=False):
        count = bounded(threads)
        least_s = min(min(s) for s, (n, _) in zip(of_products, kinds, strict=True) if n == count)
        row = {"part": part, "size": size, "threads": threads, **median_row(seconds)}
        row["product_multiply_adds_per_s"] = options.product_size**3 / least_s
        yield {**row, "multiply_adds": work[0], "weight_bytes": work[1]}


def on_threads(count: int, call: Call) -> None:
    """Call with so many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    call()
    torch.set_num_threads(before)


def code2wav_rows(config: OmniConfig, library: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Time chunks of code2wav."""
    from qwen3_omni_neuron.cpu.native.code2wav import NativeCode2Wav

    c = config.code2wav
    if c is None:
        raise InputError("this checkpoint has no code2wav.")
    module = lay_out(config, ("vocoder",))[0].code2wav
    assert module is not None
    fill_packed(module, "code2wav")
    natives = [NativeCode2Wav(module, library, threads) for threads in options.threads]
    del module
    for frames in options.frames:
        work = code2wav_work(config, frames)
        codes = torch.randint(c.codebook_size, (1, c.code_groups, frames))
        calls = [partial(native.step, codes, native.start(codes)[1]) for native in natives]
        yield from timed_rows("code2wav", frames, calls, work, options)


def code2wav_work(config: OmniConfig, frames: int) -> tuple[int, int]:
    """Return the multiply-adds of a later chunk of code2wav, and the bytes of its weights."""
    c = config.code2wav
    assert c is not None

    def decode(frames: int) -> None:
        Code2Wav(c)(torch.zeros(1, c.code_groups, frames, dtype=torch.int64))

    # A stream's first chunk has fewer samples: its later ones are what a frame more costs.
    adds = multiply_adds(partial(decode, 2 * frames)) - multiply_adds(partial(decode, frames))
    return adds, weight_bytes(partial(Code2Wav, c), "code2wav")


def audio_rows(config: OmniConfig, library: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Time clips by the audio encoder."""
    from qwen3_omni_neuron.cpu.native.engines import native_audio

    c = config.thinker.audio

    def encode(windows: int, frames: int) -> None:
        valid = torch.ones(windows, c.tokens(frames), dtype=torch.bool)
        AudioEncoder(c)(torch.zeros(windows, c.mel_bins, frames), valid, c.chunk_mel_frames)

    for dtype in encoder_dtypes(options):
        encoder = lay_out(config, ("thinker",))[0].audio_encoder
        assert encoder is not None
        fill_packed(encoder, "audio_encoder", dtype)
        audios = [native_audio(sharing(encoder), library, threads) for threads in options.threads]
        for seconds in options.audio_seconds:
            frames = seconds * c.chunk_mel_frames
            whole, rest = divmod(frames, c.window_mel_frames)
            adds = sum(
                multiply_adds(partial(encode, windows, length))
                for windows, length in ((whole, c.window_mel_frames), (1, rest))
                if windows and length
            )
            work = adds, weight_bytes(partial(AudioEncoder, c), "audio_encoder", dtype)
            mel = [torch.rand(c.mel_bins, frames)]
            calls = [partial(audio.encode, mel) for audio in audios]
            yield from timed_rows(f"audio encoder {dtype}", seconds, calls, work, options)


def vision_rows(config: OmniConfig, library: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Time images by the vision encoder."""
    from qwen3_omni_neuron.cpu.native.encoder_layers import use_native_layers, use_native_linears

    c = config.thinker.vision
    if odd := [side for side in options.pictures if side % c.merge_size]:
        raise InputError(f"a side is a multiple of {c.merge_size} patches, got {odd[0]}.")

    def inputs(side: int) -> tuple[Tensor, ...]:
        places, grid = patch_places(side, side, c.merge_size), torch.tensor((side, side))
        return torch.rand(1, side**2, c.patch_values), places, grid, torch.ones(side**2) > 0

    def encode(side: int) -> None:
        VisionEncoder(c)(*inputs(side))

    for dtype in encoder_dtypes(options):
        encoder = lay_out(config, ("thinker",))[0].vision_encoder
        assert encoder is not None
        fill_packed(encoder, "vision_encoder", dtype)
        # Not CpuVision: its images are of uint8 pixels, which it would prepare in each call.
        encoders = [sharing(encoder) for _ in options.threads]
        for own, threads in zip(encoders, options.threads, strict=True):
            use_native_layers(own, library, threads)
            use_native_linears(own, library, threads)
        for side in options.pictures:
            adds, given = multiply_adds(partial(encode, side)), inputs(side)
            work = adds, weight_bytes(partial(VisionEncoder, c), "vision_encoder", dtype)
            calls = [partial(own, *given) for own in encoders]
            yield from timed_rows(f"vision encoder {dtype}", side**2, calls, work, options)


def encoder_dtypes(options: argparse.Namespace) -> list[str]:
    """Return the dtypes to time the encoders in, which in int4 are as in int8."""
    chosen = options.dtype or DTYPES
    return list(dict.fromkeys("int8" if dtype == "int4" else dtype for dtype in chosen))


def prefill_rows(config: OmniConfig, library: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Time prompts through one layer of the thinker."""
    from qwen3_omni_neuron.cpu.native.steps import NativeSteps

    c = replace(config.thinker.text, layers=1, vocab_size=1)
    one_layer = replace(config, thinker=replace(config.thinker, text=c))
    for dtype in options.dtype or DTYPES:
        thinker = lay_out(one_layer, ("thinker",))[0].thinker
        assert thinker is not None
        # Before it is filled: a packed matrix has other dimensions.
        works = [work_of("thinker", thinker, c, dtype, count) for count in options.prompts]
        fill_packed(thinker, "thinker", dtype)
        cache = KvCache.zeros(c, 1, max(options.prompts), torch.float32)
        steps = [NativeSteps(c, thinker, cache, library, threads) for threads in options.threads]
        for count, work in zip(options.prompts, works, strict=True):
            given = torch.randn(count, c.hidden_size), torch.arange(count).float().expand(3, -1)
            calls = [partial(one.prefill, 0, 0, *given) for one in steps]
            counts = work.multiply_adds, work.distinct_bytes
            yield from timed_rows(f"thinker prefill {dtype}", count, calls, counts, options)


def sharing(module: Module) -> Module:
    """Copy a module, but not its weights."""
    return copy.deepcopy(module, {id(held): held for held in module.parameters()})


def fill_packed(module: nn.Module, part: str, dtype: str = "mixed") -> None:
    """Give a module on the meta device random weights as the CPU keeps them, one at a time."""
    for name, weight in list(module.named_parameters()):
        form = weight_form(precision_of(dtype), part, module, name)
        bound = (weight.numel() / len(weight)) ** -0.5 if weight.ndim > 1 else 1.0
        drawn = torch.empty(weight.shape).uniform_(-bound, bound).to(form.dtype)
        put_kept(module, name, form, form.keep(name, drawn))


def multiply_adds(call: Call) -> int:
    """Count the multiply-adds of a call that makes its own tensors; nothing is computed."""
    # As products: the count leaves out torch's own kernel of attention on the CPU.
    math = sdpa_kernel(SDPBackend.MATH)
    with FakeTensorMode(), math, FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops() // 2)


def weight_bytes(make: Callable[[], nn.Module], part: str, dtype: str = "mixed") -> int:
    """Return the bytes of a part's weights as the CPU keeps them, without tables of rows."""
    with torch.device("meta"):
        module = make()
    names = [name for name, _ in module.named_parameters() if "embedding.weight" not in name]
    return sum(kept_bytes(precision_of(dtype), part, module, name) for name in names)


if __name__ == "__main__":
    sys.exit(main())
