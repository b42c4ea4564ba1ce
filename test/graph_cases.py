"""Graphs at sizes that the tiny checkpoint computes in no time."""

from qwen3_omni_neuron.graphs.buckets import GraphBuckets

# Two of each where a size may matter: prompts of few and of many rows take experts differently.
TINY_BUCKETS = GraphBuckets(
    audio_windows=(1, 2),
    vision_patches=(16, 64),
    prompt_rows=(12, 40),
    media_rows=(8,),
    slots=(1, 3),
    windows=(16, 64),
    thinker_positions=64,
    talker_positions=64,
    chunk_frames=(1, 4),
)
