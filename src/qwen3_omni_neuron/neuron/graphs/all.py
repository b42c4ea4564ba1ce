"""The graphs of a checkpoint, and the modules they are traced from."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from qwen3_omni_neuron.checkpoint.modules import Models, cast, lay_out
from qwen3_omni_neuron.compilation.manifest import GraphRecord, TensorRecord
from qwen3_omni_neuron.compilation.plan import MODEL_PARTS, CompilePlan
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.neuron.graphs.cut import local_kv_heads
from qwen3_omni_neuron.neuron.graphs.decoders import (
    decode_graph,
    flush_graph,
    prompt_graph,
    windows_of,
)
from qwen3_omni_neuron.neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.neuron.graphs.parts import (
    audio_graph,
    code2wav_graph,
    predictor_graph,
    projection_graphs,
    vision_graph,
)

PARTS = (
    "audio_encoder",
    "vision_encoder",
    "thinker",
    "text_projection",
    "hidden_projection",
    "talker",
    "code_predictor",
    "code2wav",
)


def all_graphs(config: OmniConfig, plan: CompilePlan) -> Iterator[Graph]:
    """Yield every graph of a plan at every bucket, as one core runs it.

    Inputs and outputs are not sharded; a KV cache has one core's heads.
    """
    c, dtype = config.thinker, getattr(torch, plan.arithmetic)
    for windows in plan.audio_windows:
        yield audio_graph(c.audio, windows, dtype)
    for patches in plan.patch_buckets:
        yield vision_graph(c.vision, patches, dtype)
    yield from _decoder_graphs(config, "thinker", plan)
    if config.talker is None or config.code2wav is None:
        return
    for rows in plan.projection_rows:
        yield from projection_graphs(config.talker, rows, dtype)
    yield from _decoder_graphs(config, "talker", plan)
    # For all slots: beside reading the weights, more rows cost next to nothing.
    slots, top_k = plan.max_concurrency, plan.predictor_top_k
    step = decode_graph(config, "talker", slots, plan.talker_context_length, plan).inputs
    step = step if plan.chunked_prefill else ()  # NxDI's decoders are not of this package
    yield predictor_graph(config.talker, slots, top_k, *predictor_types(plan), step)
    wav = config.code2wav
    kv = local_kv_heads(wav.heads, wav.kv_heads, plan.degree("code2wav"))
    for streams, frames in product(plan.batches, plan.chunk_frames):
        yield code2wav_graph(wav, streams, frames, plan.max_concurrency, dtype, kv)


def predictor_types(plan: CompilePlan) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the code predictor's weights and arithmetic."""
    arithmetic = getattr(torch, plan.predictor_arithmetic)
    wide = plan.predictor_dtype == "float32"
    return arithmetic if wide else getattr(torch, plan.arithmetic), arithmetic


def static_models(
    config: OmniConfig, dtype: torch.dtype = torch.bfloat16, int8: bool = False
) -> Models:
    """Return the traced modules, on the meta device, in static shapes."""
    models, _ = lay_out(static_config(config, int8))
    for name in PARTS:
        module = getattr(models, name)
        if module is not None:
            cast(module, dtype)
            module.to(device="meta")
    return models


def static_config(config: OmniConfig, int8: bool) -> OmniConfig:
    """Return the config with experts in static shapes; see model.moe. int8: of the thinker."""
    thinker = replace(config.thinker, text=_static(config.thinker.text, int8))
    if config.talker is None:
        return replace(config, thinker=thinker)
    talker = replace(config.talker, text=_static(config.talker.text))
    return replace(config, thinker=thinker, talker=talker)


def _static(c: DecoderConfig, int8: bool = False) -> DecoderConfig:
    if c.moe is None:
        return c
    return replace(c, moe=replace(c.moe, static=True, int8=int8))


def _decoder_graphs(config: OmniConfig, part: str, plan: CompilePlan) -> Iterator[Graph]:
    windows = windows_of(part, plan)
    for rows, window in _prefill_sizes(plan, windows):
        yield prompt_graph(config, part, rows, window, plan)
    for window in windows if plan.chunked_prefill else ():
        yield flush_graph(config, part, window, plan)
    for slots, window in product(plan.batches, windows):
        yield decode_graph(config, part, slots, window, plan)


def _prefill_sizes(plan: CompilePlan, windows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield rows and window of each prefill graph; an NxDI prompt is its own window."""
    sizes = plan.prompt_buckets
    if not plan.chunked_prefill:
        yield from zip(sizes, sizes, strict=True)
        return
    for window in windows:
        yield from ((rows, window) for rows in sorted({min(size, window) for size in sizes}))


def graph_records(config: OmniConfig, plan: CompilePlan, model: str) -> tuple[GraphRecord, ...]:
    """Return records of one model's graphs. model: one of compilation.plan.MODELS."""
    return tuple(
        GraphRecord(
            graph.name,
            graph.bucket,
            _records(graph.inputs),
            _records(graph.outputs),
            _records(graph.state),
        )
        for graph in all_graphs(config, plan)
        if graph.part in MODEL_PARTS[model]
    )


def _records(specs: Sequence[TensorSpec]) -> dict[str, TensorRecord]:
    return {s.name: TensorRecord(s.shape, str(s.dtype).removeprefix("torch.")) for s in specs}
