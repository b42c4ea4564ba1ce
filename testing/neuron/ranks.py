"""One rank of engines with sharded weights over NxDI's CPU mode; torchrun starts it.

    torchrun --nproc-per-node 2 testing/neuron/ranks.py CHECKPOINT [WEIGHTS]

With WEIGHTS the thinker's experts are in int8, and the CPU engines run over that checkpoint.
Every rank runs the CPU engines, too, and compares. Each prints one line when all agree.
"""

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from testing.media_cases import CASES
from testing.neuron.alike import (
    ATOL,
    assert_prefills_alike,
    assert_speaks_alike,
    assert_steps_alike,
)
from testing.neuron.cpu_mode import build_cpu_mode_engines
from testing.neuron.nxdi_sources import leave_ranks, make_importable
from testing.specs import cpu_engines, engine_spec


def main(checkpoint: Path, widened: Path | None = None) -> None:
    reason = make_importable()
    assert reason is None, reason
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    prompt_builder = PromptBuilder(checkpoint, read_config(checkpoint))
    spec = engine_spec(
        checkpoint,
        "neuron",
        tp=ranks,
        max_concurrency=4,
        context_length=128,
        prompt_buckets=(48,),
        decode_buckets=(64,),
        patch_buckets=(64, 256),
        batches=(1, 3),
    )
    int8 = replace(spec, plan=replace(spec.plan, dtype="int8", mixed_arithmetic="float32"))
    whole = replace(spec, plan=replace(spec.plan, model=widened or checkpoint))
    ours, theirs = cpu_engines(whole), build_cpu_mode_engines(int8 if widened else spec)
    prompts = [
        prompt_builder.prompt(CASES[name].messages, CASES[name].use_audio_in_video)
        for name in ("image-and-audio", "video-of-odd-rate", "two-clips", "image-and-audio")
    ]
    tokens = [
        assert_prefills_alike(ours.thinker, theirs.thinker, slot, prompt)
        for slot, prompt in enumerate(prompts)
    ]
    for order in ([1], [2, 0], [3, 1, 2, 0], [1, 2, 0]):  # two take the graph of three
        after = assert_steps_alike(
            ours.thinker, theirs.thinker, order, [tokens[slot] for slot in order], steps=2
        )
        for slot, token in zip(order, after, strict=True):
            tokens[slot] = token
    assert_speaks_alike(ours, theirs, 1, prompts[0], frames=3)
    # In one write, so that lines of several ranks stay whole.
    sys.stdout.write(f"rank {os.environ['RANK']} of {ranks}: within {ATOL}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    leave_ranks()
