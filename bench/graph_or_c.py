"""The C kernels of the CPU, beside the traced torch graphs that they replace.

    python -m bench.graph_or_c --size tiny --json graph_or_c.json

Both in turn in one process on one thread, which is what a stage has on two cores; outputs are
compared before anything is timed. Rows: part, slots (or streams), rows (of a prompt, of a slot's
KV cache before a step, or codec frames), graph_s and c_s (medians), ratio (graph over C).
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.common.command_line import Figures, Row, parser_of, positive, run, sizes
from bench.common.measure import in_turn
from bench.common.models import add_size_argument, made_checkpoint
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES, Models, load_models
from qwen3_omni_neuron.cpu.native.installed import native_predictor, native_steps
from qwen3_omni_neuron.cpu.traced import DecodeGraphs, trace_graph
from qwen3_omni_neuron.cpu.vocoder import code2wav_calls, code2wav_graphs
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig, TalkerConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker

Call = Callable[[], Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("graph_or_c", __doc__)
    add_size_argument(parser)
    parser.add_argument("--slots", type=sizes, default=[1, 8])
    parser.add_argument("--prompts", type=sizes, default=[16, 32, 64, 128], help="rows of prompts")
    parser.add_argument("--lines", type=sizes, default=[64, 1024], help="KV rows before a step")
    parser.add_argument("--chunk-frames", type=sizes, default=[1, 4, 25])
    parser.add_argument("--repeats", type=positive, default=30)
    return run("graph_or_c", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure every part on one thread. The summary has the ratio of each part's first row."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with made_checkpoint(options.size) as checkpoint, torch.inference_mode():
            config = read_config(checkpoint)
            models = load_models(Checkpoint(checkpoint), config, torch.float32, STAGES)
            rows = list(rows_of(config, models, options))
    finally:
        torch.set_num_threads(threads)
    return rows, {f"{row['part']}_ratio": row["ratio"] for row in reversed(rows)}


def rows_of(config: OmniConfig, models: Models, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows, one part after the other."""
    assert config.talker and models.thinker and models.talker
    assert models.code_predictor and models.code2wav
    yield from decoder_rows(config.thinker.text, models.thinker, options)
    yield from decoder_rows(config.talker.text, models.talker, options)
    yield from predictor_rows(config.talker, models.code_predictor, options)
    yield from code2wav_rows(models.code2wav, options)


def compared(part: str, about: Row, graph: Call, native: Call, repeats: int) -> Row:
    """Return a row of both, timed in turn, after checking that their outputs agree."""
    for expected, got in zip(tensors(graph()), tensors(native()), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    graph_s, c_s = map(statistics.median, in_turn((graph, native), repeats))
    return {"part": part, **about, "graph_s": graph_s, "c_s": c_s, "ratio": graph_s / c_s}


def tensors(outputs: Any) -> list[Tensor]:
    """Return the outputs that both sides have: each side has a state of its own."""
    return (
        [t for t in outputs if isinstance(t, Tensor)] if isinstance(outputs, tuple) else [outputs]
    )


def decoder_rows(
    c: DecoderConfig, model: Thinker | Talker, options: argparse.Namespace
) -> Iterator[Row]:
    """Compare steps and prompts of the thinker or the talker."""
    name, slots = type(model).__name__.lower(), max(options.slots)
    positions = max(*options.prompts, *options.lines) + 1
    cache = KvCache.zeros(c, slots, positions, torch.float32)
    inputs = torch.arange(slots) if name == "thinker" else torch.randn(slots, c.hidden_size)
    graphs, native = DecodeGraphs(model, cache, inputs[:1]), native_steps(c, model, cache)
    assert native is not None, "the C was not compiled"
    for count in options.slots:
        for length in options.lines:
            step = list(range(count)), [length] * count, [float(length)] * count, inputs[:count]
            about = {"slots": count, "rows": length}
            calls = partial(graphs, *step), partial(native.decode, *step)
            yield compared(f"{name} step", about, *calls, options.repeats)
    for count in options.prompts:
        rows = torch.randn(count, c.hidden_size)
        at = torch.arange(count).float().expand(3, -1).contiguous()
        slot = cache.slots(0, 1)

        def prefill(rows: Tensor, at: Tensor, last: Tensor, *slot: Tensor) -> Any:
            return model.prefill(rows, at, last, PromptCache(KvCache(*slot)))

        given = rows, at, torch.tensor([count - 1]), slot.keys, slot.values
        graph = trace_graph(model, prefill, *given)
        calls = partial(graph, *given), partial(native.prefill, 0, rows, at)
        yield compared(f"{name} prompt", {"slots": 1, "rows": count}, *calls, options.repeats)


def predictor_rows(
    c: TalkerConfig, predictor: CodePredictor, options: argparse.Namespace
) -> Iterator[Row]:
    """Compare frames of the code predictor, greedy and sampled."""
    native, most = native_predictor(c, predictor), max(*options.slots, 2)
    assert native is not None, "the C was not compiled"
    hidden, code0 = torch.randn(most, c.text.hidden_size), torch.arange(most)
    draws = torch.rand(most, predictor.steps), torch.full((most,), 0.8)
    for how, given in (("greedy", (hidden, code0)), ("sampled", (hidden, code0, *draws))):
        graph = trace_graph(predictor, predictor, *(tensor[:2] for tensor in given))
        for count in options.slots:
            frame: list[Any] = [tensor[:count] for tensor in given]
            calls = partial(graph, *frame), partial(native, *frame)
            about = {"slots": count, "rows": 1}
            yield compared(f"{how} frame", about, *calls, options.repeats)


def code2wav_rows(code2wav: Code2Wav, options: argparse.Namespace) -> Iterator[Row]:
    """Compare code2wav on chunks after the first one."""
    c = code2wav.config
    pairs = code2wav_graphs(code2wav, code2wav.start, code2wav.step), code2wav_calls(code2wav)
    for streams in options.slots:
        for frames in options.chunk_frames:
            codes = torch.randint(0, c.codebook_size, (streams, c.code_groups, frames))
            (graph_start, graph_step), (c_start, c_step) = pairs
            graph = partial(graph_step, codes, graph_start(codes)[1])
            native = partial(c_step, codes, c_start(codes)[1])
            about = {"slots": streams, "rows": frames}
            yield compared("code2wav chunk", about, graph, native, options.repeats)


if __name__ == "__main__":
    sys.exit(main())
