"""The graphs of thinker and talker: prefill, copy and decode of KV cache slots."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.engines.buckets import buckets_within
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.model.kv_cache import Bank, PromptState, StepState, one_hot
from qwen3_omni_neuron.model.talker import TalkerModel
from qwen3_omni_neuron.model.thinker import ThinkerModel
from qwen3_omni_neuron.neuron.graphs.graph import Axis, Graph, Outputs, State, TensorSpec
from qwen3_omni_neuron.neuron.graphs.parallel.cut import local_kv_heads

MOST_BANKS = 8
"""Most tensors that hold the slots of one segment of a KV cache: see `slots_per_bank`."""


def slots_per_bank(plan: CompilePlan) -> int:
    """Return the number of slots that one tensor of a KV cache holds.

    One for up to 8 slots, so that a call renews its own slots alone. More slots share tensors,
    because each input costs the host time at every call.
    """
    return -(-plan.max_concurrency // MOST_BANKS)


def bank_count(plan: CompilePlan) -> int:
    """Return the number of banks that hold all slots."""
    return -(-plan.max_concurrency // slots_per_bank(plan))


def prompt_graph(
    config: OmniConfig, part: str, rows: Axis, window: Axis, plan: CompilePlan
) -> Graph:
    """Describe the prefill of a prompt's rows, or of a part of them, padded to `rows`, in one slot.

    They follow the first `length` positions of the slot, and attend to `window` positions (see
    model.kv_cache.PromptState). part: "thinker" or "talker". The thinker's also takes what
    deepstack adds to each row: zeros, or nothing, where no image or video fills it.
    """
    c, dtype = decoder_config(config, part), getattr(torch, plan.arithmetic)
    longest = window
    if isinstance(window, int) and isinstance(rows, int):
        longest = window - rows + 1
    inputs = [
        TensorSpec("rows", (rows, c.hidden_size), dtype),
        TensorSpec("positions", (3, rows), torch.float32, window),
        TensorSpec("last", (1,), torch.int64, rows),
        TensorSpec("length", (1,), torch.int64, longest),
    ]
    seen: Axis = 1
    if part == "thinker":
        layers, seen = len(config.thinker.vision.deepstack_layers), rows
        shape = (layers, rows, c.hidden_size)
        inputs.append(TensorSpec("deepstack", shape, dtype, is_optional=True))
    return Graph(
        f"{part}_prefill",
        {"rows": rows, "window": window},
        part,
        _prefill,
        (*inputs, *_slots_of(1, 1, plan)),
        (
            TensorSpec("logits", (1, c.vocab_size), dtype),
            TensorSpec("hidden", (seen, c.hidden_size), dtype),
        ),
        kv_cache_state(config, part, plan, 1, window),
        banks=1,
    )


def copy_graph(config: OmniConfig, part: str, plan: CompilePlan) -> Graph:
    """Describe the copy of a whole slot of the KV cache to another one.

    The source is in the first of two banks, the target in the second or, where a bank has several
    slots, in either.
    """
    return Graph(
        f"{part}_copy",
        {},
        part,
        _copy,
        () if slots_per_bank(plan) == 1 else _slots_of(2, 2, plan),
        (),
        kv_cache_state(config, part, plan, 2),
        banks=2,
    )


def decode_graph(
    config: OmniConfig, part: str, slots: Axis, window: Axis, plan: CompilePlan
) -> Graph:
    """Describe the decode step of `slots` slots, each of which reads `window` positions.

    A row whose length is -1 is idle: its slot's KV cache is not changed.
    """
    banks = bank_count(plan)
    if isinstance(slots, int):
        banks = min(slots, banks)
    c, dtype = decoder_config(config, part), getattr(torch, plan.arithmetic)
    row = TensorSpec("rows", (slots, c.hidden_size), dtype)
    outputs = [TensorSpec("logits", (slots, c.vocab_size), dtype)]
    if part == "thinker":
        row = TensorSpec("token_ids", (slots,), torch.int64, c.vocab_size)
    else:
        outputs.append(TensorSpec("hidden", (slots, c.hidden_size), dtype))
    return Graph(
        f"{part}_decode",
        {"slots": slots, "window": window},
        part,
        partial(_decode, banks=banks),
        (
            row,
            TensorSpec("positions", (slots,), torch.float32, window),
            TensorSpec("lengths", (slots,), torch.int64, window, idle=-1),
            *_slots_of(slots, banks, plan),
        ),
        tuple(outputs),
        kv_cache_state(config, part, plan, banks, window),
        banks=banks,
    )


def _slots_of(rows: Axis, banks: int, plan: CompilePlan) -> tuple[TensorSpec, ...]:
    """Describe the slots of a call's rows, counted through its banks.

    The number of these slots stands for an idle row. The input is left out where the rows have all
    slots of the banks, in order.
    """
    slots = banks * slots_per_bank(plan)
    return () if rows == slots else (TensorSpec("slots", (rows,), torch.int64, slots, idle=slots),)


def decoder_config(config: OmniConfig, part: str) -> DecoderConfig:
    """Return a decoder's config. part: "thinker" or "talker"."""
    if part == "thinker":
        return config.thinker.text
    assert config.talker is not None
    return config.talker.text


def kv_cache_state(
    config: OmniConfig,
    part: str,
    plan: CompilePlan,
    banks: int | None = None,
    positions: Axis | None = None,
) -> tuple[TensorSpec, ...]:
    """Describe one core's KV heads of a decoder's KV cache, bank by bank, each in segments.

    The plan's windows end the segments; see model.kv_cache.Bank. banks: None: those of all slots.
    positions: how many a graph reads, of which it takes the segments; None: all.
    """
    c, dtype = decoder_config(config, part), getattr(torch, plan.arithmetic)
    most = plan.context_length if part == "thinker" else plan.talker_context_length
    heads, needed = local_kv_heads(c.heads, c.kv_heads, plan.tp), most
    if isinstance(positions, int):
        needed = min(positions, most)
    ends = (0, *(buckets_within(most, plan.decode_buckets) or (most,)))
    each = slots_per_bank(plan)
    return tuple(
        TensorSpec(
            f"bank{bank}.positions.{begin}",
            (each, 2 * c.layers, heads, end - begin, c.head_dim),
            dtype,
        )
        for bank in range(banks or bank_count(plan))
        for begin, end in pairwise(ends)
        if begin < needed
    )


def _banks(state: State, banks: int) -> list[Bank]:
    each = len(state) // banks
    return [state[bank * each : (bank + 1) * each] for bank in range(banks)]


def _prefill(owner: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    assert isinstance(owner, ThinkerModel | TalkerModel)
    rows, positions, last, length, *more = inputs
    extra = {"deepstack": more.pop(0)} if isinstance(owner, ThinkerModel) else {}
    slot = more[0] if more else None
    cache = PromptState([state], slot, length, last, len(rows))
    return owner.prefill(rows, positions, last, cache, **extra), cache.new_state


def _copy(_: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    first, second = _banks(state, 2)
    if not inputs:
        return (), (*first, *(old.clone() for old in first))
    (slots,) = inputs
    each = len(first[0])
    source = slots[:1].clamp(max=each - 1)
    copied = [old.index_select(0, source) for old in first]
    is_target = one_hot(slots[1:], 2 * each)
    return (), tuple(
        torch.where(flags, new, old)
        for bank, flags in ((first, is_target[:each]), (second, is_target[each:]))
        for new, old in zip(copied, bank, strict=True)
    )


def _decode(
    owner: nn.Module, inputs: tuple[Tensor, ...], state: State, banks: int
) -> tuple[Outputs, State]:
    assert isinstance(owner, ThinkerModel | TalkerModel)
    rows, positions, lengths, *slots = inputs
    cache = StepState(_banks(state, banks), slots[0] if slots else None, lengths)
    outputs = owner.decode(rows, positions, cache)
    return outputs if isinstance(outputs, tuple) else (outputs,), cache.new_state
