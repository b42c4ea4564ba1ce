"""Description of a decoder on NxDI, and its graphs' inputs, in NxDI's order.

Examples for a compile and inputs of calls:

    row                  prefill (one prompt)          decode (B slots)
    input_ids            int32 [1, bucket]             int32 [B, 1]
    attention_mask       int32 [1, bucket]             int32 [B, bucket]: 1 for earlier positions
    position_ids         int32 [1, bucket]             int32 [B, 1]: where the row is written
    seq_ids              int32 [1]: the slot           int32 [B]: the slot, or IDLE
    sampling_params      float32 [1, 3], not read      float32 [B, 3], not read
    inputs_embeds        [1, bucket, hidden] *         [B, 1, hidden] *
    rotary_position_ids  float32 [3, 1, bucket]        float32 [3, B, 1]
    vision_embeddings    [1, bucket, hidden] **        -
    vision_mask          int32 [1, bucket, 1] **       -
    deepstack            [layers, 1, bucket, hidden] **

    *  if the decoder's inputs are rows (talker)       ** if it reads media (thinker)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.engines.buckets import buckets_within
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.neuron.graphs.decoders import decoder_config

EXECUTABLE_FILE = "model.pt"
DECODERS = ("thinker", "talker")
"""The parts that are NxDI's models; the others are traced from model/."""


@dataclass(frozen=True)
class DecoderSpec:
    """Description of one decoder to compile or load. part: one of DECODERS.

    A prefill graph for each of the plan's `prompt_buckets`, and a decode graph for each pair of
    `batches` and `decode_buckets`.
    """

    part: str
    config: OmniConfig
    plan: CompilePlan

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder's own config."""
        return decoder_config(self.config, self.part)

    @property
    def tp(self) -> int:
        """Number of cores that share the weights."""
        return self.plan.degree(self.part)

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations and of weights, except int8 experts."""
        dtype: torch.dtype = getattr(torch, self.plan.arithmetic)
        return dtype

    @property
    def int8(self) -> bool:
        """True if routed experts are int8 with a float32 scale per output."""
        return self.plan.dtype == "int8" and self.part == "thinker"

    @property
    def takes_rows(self) -> bool:
        """True if inputs are rows (talker), not tokens and media."""
        return self.part == "talker"

    @property
    def deepstack_layers(self) -> int:
        """Number of first layers that add image rows to their output."""
        return 0 if self.takes_rows else len(self.config.thinker.vision.deepstack_layers)


def decoder_spec(config: OmniConfig, plan: CompilePlan, part: str) -> DecoderSpec:
    """Return the spec of one of DECODERS. Raises OptionError for too long prompts."""
    context = plan.context_length if part == "thinker" else plan.talker_context_length
    if plan.prompt_buckets[-1] > context:
        raise OptionError(
            f"prompt_buckets has {plan.prompt_buckets[-1]}, but the {part}'s KV cache has "
            f"{context} positions. Leave talker_context_length out, or raise it."
        )
    windows = buckets_within(context, plan.decode_buckets)
    return DecoderSpec(part, config, replace(plan, context_length=context, decode_buckets=windows))


Inputs = tuple[Tensor, ...]
Outputs = tuple[Tensor, Tensor]
"""Logits [B, vocab] and captured hidden states [B, rows, hidden] of one call."""

IDLE = -1
"""Slot number of a padding row, whose keys and values are dropped."""
_PADDED_POSITION = -1  # NxDI regards the row with the highest as the last
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
"""Names of the inputs in use, by their number."""


@dataclass(frozen=True)
class Media:
    """Encoded media of a prompt of S rows: rows [S, hidden], read where `filled`, bool [S].

    deepstack: [layers, S, hidden].
    """

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
    """Return the inputs for a prompt of S rows, padded to its bucket.

    positions: float32 [3, S]; token_ids: int64 [S]; rows: [S, hidden].
    """
    length = positions.shape[1]
    padding = bucket - length
    indices = torch.full((1, bucket), _PADDED_POSITION, dtype=torch.int32)
    indices[0, :length] = torch.arange(length)
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
    return _in_order(ids, (indices >= 0).int(), indices, slot_ids, extra)


def decode_inputs(
    slots: Sequence[int],
    bucket: int,
    lengths: Sequence[int],
    positions: Sequence[float],
    token_ids: Sequence[int] | None = None,
    rows: Tensor | None = None,
) -> Inputs:
    """Return the inputs for one row in each of B slots; a slot may be IDLE.

    lengths: filled positions. positions: rope positions.
    """
    indices = torch.tensor(lengths, dtype=torch.int32)[:, None]
    mask = (torch.arange(bucket) < indices).int()
    ids = torch.zeros_like(indices)
    if token_ids is not None:
        ids[:, 0] = torch.tensor(token_ids)
    rotary = torch.tensor(positions, dtype=torch.float32)
    extra = {_ROTARY: rotary.view(1, -1, 1).repeat(3, 1, 1)}
    if rows is not None:
        extra[_INPUTS_EMBEDS] = rows[:, None]
    return _in_order(ids, mask, indices, torch.tensor(slots, dtype=torch.int32), extra)


def _padded(rows: Tensor, padding: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, padding))


def _in_order(
    ids: Tensor, mask: Tensor, indices: Tensor, slots: Tensor, extra: dict[int, Tensor]
) -> Inputs:
    first = (ids, mask, indices, slots, torch.zeros(len(slots), 3))
    absent = torch.empty(0)  # NxDI's mark of an absent input
    return (*first, *(extra.get(index, absent) for index in range(len(first), _COUNT)))


def prefill_example(
    bucket: int, width: int, dtype: torch.dtype, deepstack_layers: int | None, slot: int = 0
) -> Inputs:
    """Return the inputs for a prompt of one row into a slot."""
    positions, rows = torch.zeros(3, 1), torch.zeros(1, width, dtype=dtype)
    if deepstack_layers is None:
        return prefill_inputs(slot, bucket, positions, rows=rows)
    unseen = torch.zeros(deepstack_layers, 1, width, dtype=dtype)
    media = Media(rows, torch.zeros(1, dtype=torch.bool), unseen)
    return prefill_inputs(slot, bucket, positions, torch.zeros(1, dtype=torch.int64), media=media)


def decode_example(
    batch: int, bucket: int, width: int, dtype: torch.dtype, takes_rows: bool
) -> Inputs:
    """Return the inputs for a row of slot 0, with all other rows idle."""
    rows = torch.zeros(batch, width, dtype=dtype) if takes_rows else None
    slots, zeros = [0, *[IDLE] * (batch - 1)], [0] * batch
    return decode_inputs(slots, bucket, zeros, [0.0] * batch, rows=rows)


def decoder_examples(spec: DecoderSpec) -> Iterator[tuple[str, dict[str, int], Inputs]]:
    """Yield every graph's kind, its sizes and example inputs."""
    plan, takes_rows = spec.plan, spec.takes_rows
    width, dtype = spec.decoder.hidden_size, spec.dtype
    layers = None if takes_rows else spec.deepstack_layers
    for bucket in plan.prompt_buckets:
        yield "prefill", {"rows": bucket}, prefill_example(bucket, width, dtype, layers)
    for batch in plan.batches:
        for bucket in plan.decode_buckets:
            inputs = decode_example(batch, bucket, width, dtype, takes_rows)
            yield "decode", {"slots": batch, "window": bucket}, inputs
