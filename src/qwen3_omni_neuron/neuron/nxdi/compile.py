"""Compiles one model of a plan for Neuron, each part into its folder."""

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
    GraphRecord,
    ModelRecord,
    TensorRecord,
    record_files,
)
from qwen3_omni_neuron.compilation.plan import MODEL_PARTS, MODEL_STAGES, CompilePlan
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.graphs.all import graph_records
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import (
    DECODERS,
    NAMES,
    DecoderSpec,
    decoder_examples,
    decoder_spec,
)
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import decoder_shard_bytes
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import NxdToolchain
from qwen3_omni_neuron.neuron.part import part_spec
from qwen3_omni_neuron.neuron.shards import part_shard_bytes


def compile_model(
    plan: CompilePlan, model: str, folder: Path, toolchain: NxdToolchain | None = None
) -> ModelRecord:
    """Compile a model's parts into an empty folder, in its own process.

    Raises CheckpointError, CompileError, OSError, NotInstalledError.
    """
    started = time.monotonic()
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(plan.lnc)
    toolchain = toolchain or NxdToolchain()
    config, checkpoint = read_config(plan.model), Checkpoint(plan.model, plan.adapters)
    # Check names before hours of compiling.
    check_names(list(lay_out(config, (MODEL_STAGES[model],))[1].values()), checkpoint)
    for part in MODEL_PARTS[model]:
        (folder / part).mkdir()
        if part in DECODERS:
            decoder = decoder_spec(config, plan, part)
            toolchain.compile_decoder(decoder, checkpoint, folder / part)
        else:
            toolchain.compile_part(part_spec(config, plan, part), checkpoint, folder / part)
    files = record_files(folder)
    seconds = round(time.monotonic() - started, 3)
    return ModelRecord(tuple(_graph_records(config, plan, model)), files, seconds)


def expected_bytes(plan: CompilePlan, model: str) -> int:
    """Return the bytes of a model's weights, without NEFFs."""
    config, total = read_config(plan.model), 0
    for part in MODEL_PARTS[model]:
        if part in DECODERS:
            total += decoder_shard_bytes(decoder_spec(config, plan, part))
        else:
            total += part_shard_bytes(part_spec(config, plan, part))
    return total


def _graph_records(config: OmniConfig, plan: CompilePlan, model: str) -> Iterator[GraphRecord]:
    for part in MODEL_PARTS[model]:
        if part in DECODERS:
            yield from _decoder_graphs(decoder_spec(config, plan, part))
    yield from (
        record
        for record in graph_records(config, plan, model)
        if not record.name.startswith(DECODERS)
    )


def _decoder_graphs(spec: DecoderSpec) -> Iterator[GraphRecord]:
    c, dtype = spec.decoder, str(spec.dtype).removeprefix("torch.")
    for name, sizes, inputs in decoder_examples(spec):
        rows = sizes.get("slots", 1)
        captured = sizes["rows"] if (spec.part, name) == ("thinker", "prefill") else 1
        outputs = {
            "logits": TensorRecord((rows, 1, c.vocab_size), dtype),
            "hidden": TensorRecord((rows, captured, c.hidden_size), dtype),
        }
        given = {NAMES[i]: _tensor_record(x) for i, x in enumerate(inputs) if x.numel()}
        yield GraphRecord(f"{spec.part}_{name}", sizes, given, outputs, {})


def _tensor_record(tensor: Tensor) -> TensorRecord:
    return TensorRecord(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
