"""The graphs of thinker and talker: prefill and decode, with the KV cache as state."""

from functools import partial

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.graphs.graph import Axis, Graph, Outputs, State, TensorSpec
from qwen3_omni_neuron.graphs.parallel.cut import local_kv_heads
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.model.kv_cache import PromptState, StepState
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker


def prefill_graph(
    config: OmniConfig, part: str, rows: Axis, plan: CompilePlan, visual: bool = False
) -> Graph:
    """Describe the prefill of one prompt, padded to `rows`, into one slot.

    part: "thinker" or "talker". visual: with the indices of the rows that images and video fill,
    and the deepstack rows that are added there. There is an index for every row of the prompt;
    unused ones may have any value, and their deepstack rows are zeros.
    """
    c, dtype = decoder_config(config, part), getattr(torch, plan.arithmetic)
    inputs = [
        TensorSpec("rows", (rows, c.hidden_size), dtype),
        TensorSpec("positions", (3, rows), torch.float32, rows),
        TensorSpec("last", (1,), torch.int64, rows),
        TensorSpec("slot", (1,), torch.int64, plan.max_concurrency),
    ]
    if visual:
        layers = len(config.thinker.vision.deepstack_layers)
        inputs += [
            TensorSpec("visual", (rows,), torch.int64, rows),
            TensorSpec("deepstack", (layers, rows, c.hidden_size), dtype),
        ]
    seen = (rows, c.hidden_size) if part == "thinker" else (1, c.hidden_size)
    return Graph(
        f"{part}_prefill{'_visual' if visual else ''}",
        {"rows": rows},
        part,
        _prefill,
        tuple(inputs),
        (TensorSpec("logits", (1, c.vocab_size), dtype), TensorSpec("hidden", seen, dtype)),
        kv_cache_state(config, part, plan),
    )


def decode_graph(
    config: OmniConfig, part: str, slots: Axis, window: Axis, plan: CompilePlan
) -> Graph:
    """Describe the decode step of `slots` slots, each of which reads `window` positions.

    A row whose length is -1 is idle: its slot's KV cache is not changed.
    """
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
        partial(_decode, window=window),
        (
            row,
            TensorSpec("positions", (slots,), torch.float32, window),
            TensorSpec("slots", (slots,), torch.int64, plan.max_concurrency),
            TensorSpec("lengths", (slots,), torch.int64, window),
        ),
        tuple(outputs),
        kv_cache_state(config, part, plan),
    )


def decoder_config(config: OmniConfig, part: str) -> DecoderConfig:
    """Return a decoder's config. part: "thinker" or "talker"."""
    if part == "thinker":
        return config.thinker.text
    assert config.talker is not None
    return config.talker.text


def kv_cache_state(config: OmniConfig, part: str, plan: CompilePlan) -> tuple[TensorSpec, ...]:
    """Describe a decoder's KV cache, shared by all its graphs: the KV heads that one core holds.

    [slots, heads, positions, head_dim] each; see model.kv_cache.
    """
    c = decoder_config(config, part)
    positions = plan.context_length if part == "thinker" else plan.talker_context_length
    heads = local_kv_heads(c.heads, c.kv_heads, plan.tp)
    shape = (plan.max_concurrency, heads, positions, c.head_dim)
    return tuple(
        TensorSpec(f"{kind}.{layer}", shape, getattr(torch, plan.arithmetic))
        for layer in range(c.layers)
        for kind in ("keys", "values")
    )


def _prefill(owner: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    assert isinstance(owner, Thinker | Talker)
    rows, positions, last, slot, *visual = inputs
    cache = PromptState(state, slot)
    return owner.prefill(rows, positions, last, cache, *visual), tuple(cache.new_state)


def _decode(
    owner: nn.Module, inputs: tuple[Tensor, ...], state: State, window: Axis
) -> tuple[Outputs, State]:
    assert isinstance(owner, Thinker | Talker)
    assert isinstance(window, int)
    rows, positions, slots, lengths = inputs
    cache = StepState(state, slots, lengths, window)
    outputs = owner.decode(rows, positions, cache)
    return outputs if isinstance(outputs, tuple) else (outputs,), tuple(cache.new_state)
