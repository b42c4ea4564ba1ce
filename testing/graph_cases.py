"""A compile plan at sizes that the tiny checkpoint computes quickly."""

from pathlib import Path

from qwen3_omni_neuron.compilation.plan import CompilePlan

# Two of each where a size matters: prompts of few and of many rows compute experts differently.
TINY_PLAN = CompilePlan(
    model=Path(),
    target="neuron",
    tp=1,
    lnc=2,
    profile="safe",
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
)
