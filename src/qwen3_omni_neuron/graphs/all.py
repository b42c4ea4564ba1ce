"""The list of graphs of a checkpoint, and the modules they are traced from."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from qwen3_omni_neuron.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.graphs.buckets import GraphBuckets
from qwen3_omni_neuron.graphs.decoders import decode_graph, decoder_config, prefill_graph
from qwen3_omni_neuron.graphs.encoders import audio_graph, projection_graphs, vision_graph
from qwen3_omni_neuron.graphs.graph import Graph
from qwen3_omni_neuron.graphs.speech import code2wav_graph, predictor_graph
from qwen3_omni_neuron.loading import Models, fill, lay_out
from qwen3_omni_neuron.model.norm import RmsNorm
from qwen3_omni_neuron.parallel.heads import local_kv_heads

# 128 rows an expert: what a prompt of 2048 rows gives each of 128 experts at 8 a row.
EXPERT_BLOCK_ROWS = 128
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


def all_graphs(
    config: OmniConfig, buckets: GraphBuckets, dtype: torch.dtype = torch.bfloat16, tp: int = 1
) -> Iterator[Graph]:
    """A row for every graph and bucket, as one of `tp` cores runs it: inputs and outputs are
    whole, the KV cache is the core's own heads."""
    c, b = config.thinker, buckets
    yield from (audio_graph(c.audio, windows, dtype) for windows in b.audio_windows)
    yield from (vision_graph(c.vision, patches, dtype) for patches in b.vision_patches)
    yield from _decoder_graphs(config, "thinker", b, dtype, tp)
    if config.talker is None or config.code2wav is None:
        return
    for rows in b.media_rows:
        yield from projection_graphs(config.talker, rows, dtype)
    yield from _decoder_graphs(config, "talker", b, dtype, tp)
    for slots, top_k in product(b.slots, (0, b.top_k)):
        yield predictor_graph(config.talker, slots, top_k, dtype)
    wav = config.code2wav
    kv = local_kv_heads(wav.heads, wav.kv_heads, tp)
    for streams, frames, first in product(b.slots, b.chunk_frames, (True, False)):
        yield code2wav_graph(wav, streams, frames, first, b.most_slots, dtype, kv)


def static_models(config: OmniConfig, dtype: torch.dtype = torch.bfloat16) -> Models:
    """The modules that graphs are traced from, on the meta device: those of the CPU, but for the
    experts of long prompts, which are computed in blocks of fixed shape, and for the norms, which
    are spelled out."""
    models, _ = lay_out(static_config(config))
    for name in PARTS:
        module = getattr(models, name)
        if module is not None:
            module.to(dtype=dtype, device="meta")
            for layer in module.modules():
                if isinstance(layer, RmsNorm):
                    layer.spelled_out = True
    return models


def with_weights(models: Models, weights: Models) -> Models:
    """`models`, laid out by static_models, over the very parameters of loaded ones: no copy."""
    for name in PARTS:
        module, loaded = getattr(models, name), getattr(weights, name)
        if module is not None:
            fill(module, loaded.named_parameters())
            fill(module, loaded.named_buffers())
    return models


def static_config(config: OmniConfig) -> OmniConfig:
    """The config with experts in blocks: see model.moe."""
    thinker = replace(config.thinker, text=_in_blocks(config.thinker.text))
    if config.talker is None:
        return replace(config, thinker=thinker)
    talker = replace(config.talker, text=_in_blocks(config.talker.text))
    return replace(config, thinker=thinker, talker=talker)


def _in_blocks(c: DecoderConfig) -> DecoderConfig:
    return c if c.moe is None else replace(c, moe=replace(c.moe, block_rows=EXPERT_BLOCK_ROWS))


def _decoder_graphs(
    config: OmniConfig, part: str, b: GraphBuckets, dtype: torch.dtype, tp: int
) -> Iterator[Graph]:
    c = decoder_config(config, part)
    kv = local_kv_heads(c.heads, c.kv_heads, tp)
    for rows in b.prompt_rows:
        yield prefill_graph(config, part, rows, b, dtype, kv)
        if part == "thinker":
            yield prefill_graph(config, part, rows, b, dtype, kv, visual=True)
    for slots, window in product(b.slots, b.windows):
        yield decode_graph(config, part, slots, window, b, dtype, kv)
