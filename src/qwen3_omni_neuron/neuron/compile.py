"""Compiles one graph of a plan for Neuron: each of its parts into a folder of its own."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.checkpoint.parameters import check_names
from qwen3_omni_neuron.compilation.manifest import (
    CallRecord,
    GraphRecord,
    TensorRecord,
    record_files,
)
from qwen3_omni_neuron.compilation.plan import GRAPH_PARTS, GRAPH_STAGES, CompilePlan
from qwen3_omni_neuron.graphs.all import graph_calls
from qwen3_omni_neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.nxdi.inputs import NAMES, decoder_examples
from qwen3_omni_neuron.neuron.nxdi.plan import decoder_plan
from qwen3_omni_neuron.neuron.nxdi.spec import DECODERS, DecoderSpec, DecoderWeights
from qwen3_omni_neuron.neuron.nxdi.toolchain import NxdToolchain
from qwen3_omni_neuron.neuron.part.shards import expected_bytes as part_bytes
from qwen3_omni_neuron.neuron.part.spec import part_spec
from qwen3_omni_neuron.neuron.toolchain import Toolchain


def compile_graph(
    plan: CompilePlan, graph: str, folder: Path, toolchain: Toolchain | None = None
) -> GraphRecord:
    """Compile a graph's parts into `folder`, which is there and empty.

    It changes this process's environment, and NxD's state in it: it wants a process of its own.
    Raises CheckpointError, CompileError, OSError.
    """
    started = time.monotonic()
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(plan.lnc)
    os.environ.pop("NXD_CPU_MODE", None)  # which NxD looks at when it is imported
    toolchain = toolchain or NxdToolchain()
    config, checkpoint = read_config(plan.model), Checkpoint(plan.model)
    # Now, rather than after hours of compiling.
    check_names(list(lay_out(config, (GRAPH_STAGES[graph],))[1].values()), checkpoint)
    for part in GRAPH_PARTS[graph]:
        (folder / part).mkdir()
        if part in DECODERS:
            toolchain.compile_decoder(DecoderSpec(part, config, plan), checkpoint, folder / part)
        else:
            toolchain.compile_part(part_spec(config, plan, part), checkpoint, folder / part)
    files = record_files(folder)
    seconds = round(time.monotonic() - started, 3)
    return GraphRecord(tuple(_calls(config, plan, graph)), files, seconds)


def expected_bytes(plan: CompilePlan, graph: str) -> int:
    """Of the weights of a graph's parts, as the cores hold them. What its NEFFs will take is not
    known before."""
    config, total = read_config(plan.model), 0
    for part in GRAPH_PARTS[graph]:
        if part in DECODERS:
            spec = DecoderSpec(part, config, plan)
            weights = DecoderWeights.of(part, Checkpoint(plan.model), config)
            total += weights.shard_bytes(spec.plan, spec.takes_rows)
        else:
            total += part_bytes(part_spec(config, plan, part))
    return total


def _calls(config: OmniConfig, plan: CompilePlan, graph: str) -> Iterator[CallRecord]:
    for part in GRAPH_PARTS[graph]:
        if part in DECODERS:
            yield from _decoder_calls(config, plan, part)
    yield from (
        call for call in graph_calls(config, plan, graph) if not call.name.startswith(DECODERS)
    )


def _decoder_calls(config: OmniConfig, plan: CompilePlan, part: str) -> Iterator[CallRecord]:
    """Of a decoder on NxDI. Its KV cache is NxDI's own, and is not among them."""
    c = decoder_config(config, part)
    of_decoder = decoder_plan(plan, part)
    for name, sizes, inputs in decoder_examples(config, part, of_decoder):
        rows = sizes.get("slots", 1)
        seen = sizes["rows"] if (part, name) == ("thinker", "prefill") else 1
        outputs = {
            "logits": TensorRecord((rows, 1, c.vocab_size), plan.dtype),
            "hidden": TensorRecord((rows, seen, c.hidden_size), plan.dtype),
        }
        given = {NAMES[i]: _spec(x) for i, x in enumerate(inputs) if x.numel()}
        yield CallRecord(f"{part}_{name}", sizes, given, outputs, {})


def _spec(tensor: Tensor) -> TensorRecord:
    return TensorRecord(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
