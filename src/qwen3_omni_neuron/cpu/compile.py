"""Compiles a graph for the CPU: its weights, converted, ready to be mapped into memory.

Buckets are lengths that the engine pads to; the modules run at any length.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint import Checkpoint
from qwen3_omni_neuron.compiled.artifact import GraphRecord, record_files
from qwen3_omni_neuron.compiled.tensor_file import write_tensors
from qwen3_omni_neuron.config_json import read_config
from qwen3_omni_neuron.cpu.compiled import WEIGHTS_FILE
from qwen3_omni_neuron.graphs.record import graph_calls
from qwen3_omni_neuron.loading import lay_out
from qwen3_omni_neuron.plan import GRAPH_PARTS, GRAPH_STAGES, CompilePlan
from qwen3_omni_neuron.weights import Part, check_names, converted


def compile_graph(plan: CompilePlan, graph: str, folder: Path) -> GraphRecord:
    """Write a graph's weights into `folder`, one parameter at a time.

    Raises CheckpointError (see weights.load_parts), also for what else its stage needs, OSError.
    """
    started = time.monotonic()
    config, dtype = read_config(plan.model), getattr(torch, plan.dtype)
    checkpoint = Checkpoint(plan.model)
    parts = _stage_parts(plan, graph)
    check_names(list(parts.values()), checkpoint)
    chosen = {name: parts[name] for name in GRAPH_PARTS[graph]}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, part in chosen.items():
            for target, tensor in converted(part, checkpoint, dtype):
                yield f"{name}.{target}", tensor

    write_tensors(folder / WEIGHTS_FILE, _shapes(chosen), dtype, tensors())
    calls, files = graph_calls(config, plan, graph), record_files(folder)
    return GraphRecord(calls, files, round(time.monotonic() - started, 3))


def expected_bytes(plan: CompilePlan, graph: str) -> int:
    """Of a graph's weights in the plan's dtype."""
    parts = _stage_parts(plan, graph)
    shapes = _shapes({name: parts[name] for name in GRAPH_PARTS[graph]})
    return sum(shape.numel() for shape in shapes.values()) * getattr(torch, plan.dtype).itemsize


def _stage_parts(plan: CompilePlan, graph: str) -> dict[str, Part]:
    return lay_out(read_config(plan.model), (GRAPH_STAGES[graph],))[1]


def _shapes(parts: dict[str, Part]) -> dict[str, torch.Size]:
    return {
        f"{name}.{target}": part.module.get_parameter(target).shape
        for name, part in parts.items()
        for target, _ in part.pieces
    }
