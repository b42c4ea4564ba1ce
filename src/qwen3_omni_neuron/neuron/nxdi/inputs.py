"""The inputs of a decoder's graphs on NxDI, which takes them by position.

The same functions make the examples that a graph is compiled with and the inputs that it is called
with, so their shapes and types agree.

    row                  prefill (one prompt)          decode (B slots)
    input_ids            int32 [1, bucket]             int32 [B, 1]
    attention_mask       int32 [1, bucket]             int32 [B, bucket]: the positions before
    position_ids         int32 [1, bucket]             int32 [B, 1]: where the row is written
    seq_ids              int32 [1]: the slot           int32 [B]: the slot, or IDLE
    sampling_params      float32 [1, 3], unread        float32 [B, 3], unread
    inputs_embeds        [1, bucket, hidden] *         [B, 1, hidden] *
    rotary_position_ids  float32 [3, 1, bucket]        float32 [3, B, 1]
    vision_embeddings    [1, bucket, hidden] **        -
    vision_mask          int32 [1, bucket, 1] **       -
    deepstack            [layers, 1, bucket, hidden] **

    *  where the decoder takes rows (the talker)       ** where it takes media (the thinker)

Rotary positions stay float32: a video's frames lie where their times are, which are fractions.
Encoded media come at their own rows and not packed at the front with a list of places, as
Qwen3-VL's do: nothing is scattered, and as many bytes are sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.graphs.decoders import decoder_config
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.nxdi.plan import DecoderPlan

Inputs = tuple[Tensor, ...]

IDLE = -1  # in the place of a slot: the row is padding, and its keys and values are thrown away
NOWHERE = -1  # position of a padded row. Less than any: the last row is found as the highest
_COUNT = 25
_INPUTS_EMBEDS, _ROTARY, _MEDIA, _MEDIA_MASK, _DEEPSTACK = 18, 21, 22, 23, 24
NAMES = {
    0: "input_ids",
    1: "attention_mask",
    2: "position_ids",
    3: "seq_ids",
    4: "sampling_params",
    _INPUTS_EMBEDS: "inputs_embeds",
    _ROTARY: "rotary_position_ids",
    _MEDIA: "vision_embeddings",
    _MEDIA_MASK: "vision_mask",
    _DEEPSTACK: "deepstack",
}
"""Of those that are given, by their position."""


@dataclass(frozen=True)
class Media:
    """A prompt's media at their places. rows: [S, hidden], of which those count that `filled`,
    bool [S], names. deepstack: [layers, S, hidden], 0 where nothing is to be seen."""

    rows: Tensor
    filled: Tensor
    deepstack: Tensor


def prefill_inputs(
    slot: int,
    bucket: int,
    positions: Tensor,
    token_ids: Tensor | None = None,
    rows: Tensor | None = None,
    media: Media | None = None,
) -> Inputs:
    """A prompt of S rows, padded to its bucket. positions: float32 [3, S]; token_ids: int64 [S];
    rows: [S, hidden]."""
    length = positions.shape[1]
    padding = bucket - length
    places = torch.full((1, bucket), NOWHERE, dtype=torch.int32)
    places[0, :length] = torch.arange(length)
    ids = torch.zeros(1, bucket, dtype=torch.int32)
    if token_ids is not None:
        ids[0, :length] = token_ids
    extra = {_ROTARY: F.pad(positions.float(), (0, padding))[:, None]}
    if rows is not None:
        extra[_INPUTS_EMBEDS] = _padded(rows, padding)[None]
    if media is not None:
        extra[_MEDIA] = _padded(media.rows, padding)[None]
        extra[_MEDIA_MASK] = F.pad(media.filled.int(), (0, padding)).view(1, bucket, 1)
        extra[_DEEPSTACK] = _padded(media.deepstack, padding)[:, None]
    slot_ids = torch.tensor([slot], dtype=torch.int32)
    return _by_position(ids, (places >= 0).int(), places, slot_ids, extra)


def decode_inputs(
    slots: Sequence[int],
    bucket: int,
    lengths: Sequence[int],
    positions: Sequence[float],
    token_ids: Sequence[int] | None = None,
    rows: Tensor | None = None,
) -> Inputs:
    """One row in each of B slots, IDLE ones included. lengths: of what a slot holds; positions:
    rope positions, the same on all axes; rows: [B, hidden]."""
    places = torch.tensor(lengths, dtype=torch.int32)[:, None]
    mask = (torch.arange(bucket) < places).int()
    ids = torch.zeros_like(places)
    if token_ids is not None:
        ids[:, 0] = torch.tensor(token_ids)
    rotary = torch.tensor(positions, dtype=torch.float32)
    extra = {_ROTARY: rotary.view(1, -1, 1).repeat(3, 1, 1)}
    if rows is not None:
        extra[_INPUTS_EMBEDS] = rows[:, None]
    return _by_position(ids, mask, places, torch.tensor(slots, dtype=torch.int32), extra)


def _padded(rows: Tensor, padding: int) -> Tensor:
    """[..., S, hidden] -> [..., S + padding, hidden]."""
    return F.pad(rows, (0, 0, 0, padding))


def _by_position(
    ids: Tensor, mask: Tensor, places: Tensor, slots: Tensor, extra: dict[int, Tensor]
) -> Inputs:
    first = (ids, mask, places, slots, torch.zeros(len(slots), 3))
    absent = torch.empty(0)  # what NxDI takes for an input that is not given
    return (*first, *(extra.get(index, absent) for index in range(len(first), _COUNT)))


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
