"""Host time of target torchneuron: of a call of a graph, and of capturing one.

    python -m bench.host --json host.json

The backend computes nothing, so what is timed is the host's part. The graphs have the released
numbers of layers, and small widths; one rank, 8 slots. With small widths more weights are joined:
at the released ones a call has up to 21 tensors.

A row has, in CPU time of this process: call_ms, the least of several rounds of calls; capture_s;
aot_s, what AOTAutograd takes, which TorchNeuron's backend runs; inputs: tensors that the compiled
graph takes.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.neuron.part import part_spec, to_device_type
from qwen3_omni_neuron.neuron.torchneuron.graph import BACKEND, PartGraphs
from testing.command_line import Figures, parser_of, positive, run
from testing.headlines import headline
from testing.released import CODE2WAV, RELEASED, TALKER
from testing.specs import plan_of
from testing.torchneuron.supported import DECOMPOSED, WRITTEN_DECOMPOSITIONS

GRAPHS = ("thinker_prefill", "thinker_flush", "thinker_decode", "talker_decode", "code_predictor",
          "code2wav")  # fmt: skip
ROUNDS = 5


class EmptyBackend:
    """A backend of torch.compile whose graphs compute nothing. See the module for its figures."""

    def __init__(self) -> None:
        self.aot_s, self.inputs = 0.0, 0

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        """Compile a graph."""
        table = {**get_decompositions(DECOMPOSED), **WRITTEN_DECOMPOSITIONS}
        started = time.process_time()
        compiled = aot_autograd(
            fw_compiler=self._empty, keep_inference_input_mutations=True, decompositions=table
        )(module, inputs)
        self.aot_s = time.process_time() - started
        return compiled

    def _empty(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.inputs = len(inputs)
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        shapes = [(node.meta["val"].shape, node.meta["val"].dtype) for node in output.args[0]]
        made: list[Tensor] = []

        def outputs(*_: Any) -> list[Tensor]:
            if not made:  # here, and not above, where they would be fake
                made.extend(torch.empty(shape, dtype=dtype) for shape, dtype in shapes)
            return list(made)

        return make_boxed_func(outputs)


def narrow(config: OmniConfig, layers: int | None) -> OmniConfig:
    """Return the config with small widths. layers: of each decoder; None: as they are."""

    def decoder(c: DecoderConfig) -> DecoderConfig:
        shared = 16 if c.moe is not None and c.moe.shared_expert_width else 0
        moe = c.moe and replace(c.moe, experts=16, expert_width=16, shared_expert_width=shared)
        rope = replace(c.rope, mrope_section=c.rope.mrope_section and (4, 2, 2))
        c = replace(c, hidden_size=64, head_dim=16, ffn_width=64, vocab_size=256, rope=rope)
        return replace(c, moe=moe, layers=layers or c.layers)

    text, predictor = decoder(TALKER.text), decoder(TALKER.predictor)
    accepted = min(TALKER.accept_hidden_layer, layers or TALKER.accept_hidden_layer)
    return replace(
        config,
        thinker=replace(config.thinker, text=decoder(config.thinker.text)),
        talker=replace(
            TALKER,
            text=text,
            predictor=predictor,
            thinker_hidden_size=64,
            accept_hidden_layer=accepted,
        ),
        code2wav=replace(CODE2WAV, hidden_size=128, ffn_width=64, codebook_size=64, decoder_dim=64),
    )


def measure(options: argparse.Namespace) -> Figures:
    """Time each graph."""
    torch.set_num_threads(1)
    backend = EmptyBackend()
    register_backend(backend, name=BACKEND)
    config = narrow(RELEASED, options.layers)
    plan = plan_of(
        Path(), config, "torchneuron", tp="1", context_length=128, talker_context_length=128,
        decode_buckets=(128,), prompt_buckets=(64,), batches=(8,), chunk_frames=(4,),
    )  # fmt: skip
    rows = []
    for name in GRAPHS:
        part = name if name.startswith("code") else name.partition("_")[0]
        whole = part_spec(config, plan, part)
        graph = next(graph for graph in whole.graphs if graph.name == name)
        part_graphs = PartGraphs(replace(whole, graphs=(graph,)), torch.device("cpu"))
        given = {spec.name: to_device_type(spec.idle_input()) for spec in graph.inputs}
        started = time.process_time()
        part_graphs.run(graph.label, given)
        total = time.process_time() - started
        calls = []
        for _ in range(ROUNDS):
            started = time.process_time()
            for _ in range(options.calls):
                part_graphs.run(graph.label, given)
            calls.append((time.process_time() - started) / options.calls)
        rows.append(
            {
                "graph": name,
                "inputs": backend.inputs,
                "call_ms": 1e3 * min(calls),
                "capture_s": total - backend.aot_s,
                "aot_s": backend.aot_s,
            }
        )
    captured = sum(row["capture_s"] + row["aot_s"] for row in rows)
    headlines = [
        headline("host's time of a call", [row["call_ms"] for row in rows], "ms"),
        headline("capture of all graphs", [captured], "s"),
    ]
    return rows, {}, headlines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the rows."""
    parser = parser_of("host", __doc__)
    parser.add_argument("--layers", type=positive, help="layers of each decoder; default: released")
    parser.add_argument("--calls", type=positive, default=100, help="calls a round; default: 100")
    return run("host", parser, measure, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
