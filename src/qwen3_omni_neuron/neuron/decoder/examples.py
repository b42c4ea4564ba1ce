"""Inputs for one call of each graph of a decoder: to compile it with, to warm it up, to say what it
takes."""

from collections.abc import Iterator

import torch

from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.neuron.decoder.inputs import (
    IDLE,
    Inputs,
    Media,
    decode_inputs,
    prefill_inputs,
)
from qwen3_omni_neuron.neuron.decoder.plan import DecoderPlan


def prefill_example(
    bucket: int, width: int, dtype: torch.dtype, deepstack_layers: int | None
) -> Inputs:
    """A prompt of one row into slot 0.

    width: of the decoder's rows. deepstack_layers: of the thinker; None for the talker, which takes
    rows.
    """
    positions, rows = torch.zeros(3, 1), torch.zeros(1, width, dtype=dtype)
    if deepstack_layers is None:
        return prefill_inputs(0, bucket, positions, rows=rows)
    unseen = torch.zeros(deepstack_layers, 1, width, dtype=dtype)
    media = Media(rows, torch.zeros(1, dtype=torch.bool), unseen)
    return prefill_inputs(0, bucket, positions, torch.zeros(1, dtype=torch.int64), media=media)


def decode_example(
    batch: int, bucket: int, width: int, dtype: torch.dtype, takes_rows: bool
) -> Inputs:
    """A row of slot 0, and idle ones."""
    rows = torch.zeros(batch, width, dtype=dtype) if takes_rows else None
    slots, zeros = [0, *[IDLE] * (batch - 1)], [0] * batch
    return decode_inputs(slots, bucket, zeros, [0.0] * batch, rows=rows)


def decoder_examples(
    config: OmniConfig, part: str, plan: DecoderPlan
) -> Iterator[tuple[str, dict[str, int], Inputs]]:
    """ "prefill" or "decode", the sizes, and the inputs of every graph. part: "thinker" or
    "talker"."""
    width, dtype = decoder_config(config, part).hidden_size, plan.dtype
    takes_rows = part == "talker"
    layers = None if takes_rows else len(config.thinker.vision.deepstack_layers)
    for bucket in plan.prompt_buckets:
        yield "prefill", {"rows": bucket}, prefill_example(bucket, width, dtype, layers)
    for batch in plan.batches:
        for bucket in plan.decode_buckets:
            inputs = decode_example(batch, bucket, width, dtype, takes_rows)
            yield "decode", {"slots": batch, "window": bucket}, inputs
