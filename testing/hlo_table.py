"""A table of every graph's operations, lowered on a CPU, of those that move, and that are flagged.

    pip install torch==2.9.* torch_xla==2.9.*     # in an environment of its own
    python -m testing.hlo_table

Nothing is executed: a graph's size does not change its operations, so the tiny one's are listed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.neuron.graphs.all import all_graphs, static_models
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.nxdi.target import NEURON
from qwen3_omni_neuron.neuron.part import to_device_type
from testing.command_line import parser_of
from testing.graph_cases import with_weights
from testing.hlo import Findings, lint_hlo, lint_stablehlo
from testing.int8_experts import int8_models
from testing.models import load_models
from testing.tiny import write_tiny_checkpoint

MOVES = frozenset(
    {"scatter", "gather", "dynamic_slice", "dynamic_update_slice", "concatenate", "transpose"}
)


def lower(graph: Graph, owner: nn.Module) -> tuple[str, str]:
    """Return a graph as HLO and as StableHLO.

    owner: the graph's part, which is moved to the XLA device. Inputs have the types that they have
    on a device. Needs torch_xla. Raises RuntimeError for an operation without HLO in torch_xla,
    which would be computed on the CPU between operations of the graph.
    """
    import torch_xla
    from torch_xla.core.xla_model import get_stablehlo
    from torch_xla.debug import metrics

    metrics.clear_counters()
    device = torch_xla.device()
    module = graph.module(owner).eval().to(device)
    with torch.no_grad():
        out = list(module(*[to_device_type(tensor).to(device) for tensor in graph.example()]))
    missing = [name for name in metrics.counter_names() if name.startswith("aten::")]
    if missing:
        raise RuntimeError(f"{graph.label} has no HLO of {', '.join(missing)}")
    return torch_xla._XLAC._get_xla_tensors_hlo(out), get_stablehlo(out)


def lowered(folder: Path) -> Iterator[tuple[Graph, Findings, Findings]]:
    """Lower every graph over a tiny checkpoint, in the released precision.

    Yields the findings in its HLO, and in its StableHLO.
    """
    # Prompts of few and of many rows use experts differently, as do one slot and several.
    config = read_config(folder)
    weights = load_models(Checkpoint(folder), config, torch.bfloat16)
    models = with_weights(static_models(config), weights)
    in_int8 = int8_models(config, weights, torch.bfloat16)
    plan = make_plan(
        folder,
        config,
        NEURON.limits,
        tp=1,
        dtype="bfloat16",
        max_concurrency=3,
        context_length=64,
        talker_context_length=64,
        prompt_buckets=(12, 40),
        decode_buckets=(64,),
        patch_buckets=(64,),
        audio_windows=(1,),
        projection_rows=(8,),
        batches=(1,),
        chunk_frames=(1, 4),
    )
    # With chunked prefill, for target torchneuron: every graph of either target is linted.
    for graph in all_graphs(config, replace(plan, chunked_prefill=True)):
        hlo, stablehlo = lower(graph, getattr(models, graph.part))
        yield graph, lint_hlo(hlo), lint_stablehlo(stablehlo)
        if graph.part == "thinker" and graph.outputs:
            hlo, stablehlo = lower(graph, getattr(in_int8, graph.part))
            named = replace(graph, name=f"{graph.name}_int8")
            yield named, lint_hlo(hlo), lint_stablehlo(stablehlo)


def cell(counts: Counter[str]) -> str:
    """Format the counts, the most frequent first."""
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser_of("testing.hlo_table", __doc__).parse_args(arguments)
    print("| graph | operations | moves in StableHLO | rejected | replaced by another form |")
    print("| --- | ---: | --- | --- | --- |")
    with TemporaryDirectory() as folder:
        for graph, found, stablehlo in lowered(write_tiny_checkpoint(Path(folder))):
            total = sum(found.ops.values())
            moves = Counter({op: n for op, n in stablehlo.ops.items() if op in MOVES})
            cells = " | ".join(map(cell, (moves, found.rejected, found.noted)))
            print(f"| {graph.label} | {total} | {cells} |")


if __name__ == "__main__":
    main()
