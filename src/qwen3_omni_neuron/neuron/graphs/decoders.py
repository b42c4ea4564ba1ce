"""The graphs of thinker and talker: prefill, chunked prefill, copy and decode of KV cache slots."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.engines.buckets import buckets_within
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.model.kv_cache import PromptChunkState, PromptState, StepState, one_hot
from qwen3_omni_neuron.model.talker import TalkerModel
from qwen3_omni_neuron.model.thinker import ThinkerModel
from qwen3_omni_neuron.neuron.graphs.graph import Axis, Graph, Outputs, State, TensorSpec
from qwen3_omni_neuron.neuron.graphs.parallel.cut import local_kv_heads

# A chunked prefill in the names of graphs: compiled trees have "thinker_extend" in their manifests.
CHUNK_KIND = "extend"
PREFILL_CHUNK_ROWS = (16, 128, 512)
"""Row counts that a chunk of a prefill is padded to.

16: the few template rows between a question and its answer, or a short turn of text. 128: a window
of 8 s of speech (104 rows) with the template around it. 512: a long text or an image. More rows
take several calls. The windows are those of the decode graphs: a call of up to about 200 rows takes
as long as reading the weights of all experts (10.5 ms at TP 8, see docs/trn2.md), and renewing 8
slots adds 1.2 ms to that at a window of 2048 positions, 4.7 ms at 8192.
"""


def prompt_graph(
    config: OmniConfig,
    part: str,
    rows: Axis,
    plan: CompilePlan,
    window: Axis | None = None,
    visual: bool = False,
) -> Graph:
    """Describe the prefill of a prompt's rows, padded to `rows`, in one slot.

    part: "thinker" or "talker". window: None for a whole prompt, from position 0 on ("prefill");
    else the rows are a chunk of a prefill: they follow the first `length` positions of the slot and
    attend to `window` positions (see model.kv_cache.PromptChunkState). visual: whether the graph
    also takes what deepstack adds to each row, zeros where no image or video fills it.
    """
    c, dtype = decoder_config(config, part), getattr(torch, plan.arithmetic)
    inputs = [
        TensorSpec("rows", (rows, c.hidden_size), dtype),
        TensorSpec("positions", (3, rows), torch.float32, rows if window is None else window),
        TensorSpec("last", (1,), torch.int64, rows),
        TensorSpec("slot", (1,), torch.int64, plan.max_concurrency),
    ]
    bucket = {"rows": rows}
    if window is not None:
        longest = window
        if isinstance(window, int) and isinstance(rows, int):
            longest = window - rows + 1
        inputs.append(TensorSpec("length", (1,), torch.int64, longest))
        bucket["window"] = window
    if visual:
        layers = len(config.thinker.vision.deepstack_layers)
        inputs.append(TensorSpec("deepstack", (layers, rows, c.hidden_size), dtype))
    seen = (rows, c.hidden_size) if part == "thinker" else (1, c.hidden_size)
    kind = "prefill" if window is None else CHUNK_KIND
    return Graph(
        f"{part}_{kind}{'_visual' if visual else ''}",
        bucket,
        part,
        _prefill if window is None else _prefill_chunk,
        tuple(inputs),
        (TensorSpec("logits", (1, c.vocab_size), dtype), TensorSpec("hidden", seen, dtype)),
        kv_cache_state(config, part, plan, rows if window is None else window),
    )


def copy_graph(config: OmniConfig, part: str, plan: CompilePlan) -> Graph:
    """Describe the copy of a whole slot of the KV cache to another one.

    It reads and writes all positions of all slots, however few are in use. At the released sizes
    and TP 8 those are 1.6 GB each way on a core for 8 slots of 8192 positions of the thinker.
    """
    slot = TensorSpec("source", (1,), torch.int64, plan.max_concurrency)
    return Graph(
        f"{part}_copy",
        {},
        part,
        _copy,
        (slot, replace(slot, name="target")),
        (),
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
        _decode,
        (
            row,
            TensorSpec("positions", (slots,), torch.float32, window),
            TensorSpec("slots", (slots,), torch.int64, plan.max_concurrency),
            TensorSpec("lengths", (slots,), torch.int64, window),
        ),
        tuple(outputs),
        kv_cache_state(config, part, plan, window),
    )


def decoder_config(config: OmniConfig, part: str) -> DecoderConfig:
    """Return a decoder's config. part: "thinker" or "talker"."""
    if part == "thinker":
        return config.thinker.text
    assert config.talker is not None
    return config.talker.text


def kv_cache_state(
    config: OmniConfig, part: str, plan: CompilePlan, positions: Axis | None = None
) -> tuple[TensorSpec, ...]:
    """Describe one core's KV heads of a decoder's KV cache, in segments that all its graphs share.

    The plan's windows end the segments; see model.kv_cache.KvTensors. positions: how many a graph
    reads, of which it takes the segments; None: all.
    """
    c, dtype = decoder_config(config, part), getattr(torch, plan.arithmetic)
    most = plan.context_length if part == "thinker" else plan.talker_context_length
    heads, needed = local_kv_heads(c.heads, c.kv_heads, plan.tp), most
    if isinstance(positions, int):
        needed = min(positions, most)
    ends = (0, *(buckets_within(most, plan.decode_buckets) or (most,)))
    return tuple(
        TensorSpec(
            f"positions.{begin}",
            (plan.max_concurrency, 2 * c.layers, heads, end - begin, c.head_dim),
            dtype,
        )
        for begin, end in pairwise(ends)
        if begin < needed
    )


def _prefill(owner: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    assert isinstance(owner, ThinkerModel | TalkerModel)
    rows, positions, last, slot, *visual = inputs
    cache = PromptState(state, slot)
    return owner.prefill(rows, positions, last, cache, *visual), cache.new_state


def _prefill_chunk(
    owner: nn.Module, inputs: tuple[Tensor, ...], state: State
) -> tuple[Outputs, State]:
    assert isinstance(owner, ThinkerModel | TalkerModel)
    rows, positions, last, slot, length, *visual = inputs
    cache = PromptChunkState(state, slot, length, last, len(rows))
    return owner.prefill(rows, positions, last, cache, *visual), cache.new_state


def _copy(_: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    source, target = inputs
    is_target = one_hot(target, len(state[0]))
    return (), tuple(torch.where(is_target, old.index_select(0, source), old) for old in state)


def _decode(owner: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    assert isinstance(owner, ThinkerModel | TalkerModel)
    rows, positions, slots, lengths = inputs
    cache = StepState(state, slots, lengths)
    outputs = owner.decode(rows, positions, cache)
    return outputs if isinstance(outputs, tuple) else (outputs,), cache.new_state
