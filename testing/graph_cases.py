"""A compile plan at sizes that the tiny checkpoint computes quickly."""

from pathlib import Path

from qwen3_omni_neuron.checkpoint.modules import Models, fill
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.neuron.graphs.all import PARTS

# Two of each where a size matters: prompts of few and of many rows compute experts differently.
TINY_PLAN = CompilePlan(
    model=Path(),
    target="neuron",
    tp=Degrees.same(1),
    lnc=2,
    dtype="float32",
    max_concurrency=3,
    context_length=64,
    talker_context_length=64,
    prompt_buckets=(12, 40),
    decode_buckets=(16, 64),
    patch_buckets=(16, 64),
    audio_windows=(1, 2),
    projection_rows=(8,),
    batches=(1, 3),
    chunk_frames=(1, 4),
    predictor_top_k=50,
    chunked_prefill=True,
)


def with_weights(models: Models, weights: Models) -> Models:
    """Fill modules laid out by `static_models` with the parameters of loaded ones, not copied."""
    for name in PARTS:
        module, loaded = getattr(models, name), getattr(weights, name)
        if module is not None:
            fill(module, loaded.named_parameters())
            fill(module, loaded.named_buffers())
    return models
