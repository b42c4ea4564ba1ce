"""Graphs of thinker and talker: prefill, decode and flush of KV cache slots."""

from collections.abc import Iterable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.model.kv_cache import PromptState, StepState, flushed
from qwen3_omni_neuron.model.talker import TalkerModel
from qwen3_omni_neuron.model.thinker import ThinkerModel
from qwen3_omni_neuron.neuron.graphs.cut import local_kv_heads
from qwen3_omni_neuron.neuron.graphs.graph import Graph, Outputs, State, TensorSpec

MOST_RECENT_ROWS = 64
"""Upper bound of a slot's rows that decode steps write before a flush into its KV cache.

A step rewrites all of them: 12.6 MB for 8 slots of the thinker at TP 8. A flush rewrites 0.1 to 1.6
GB, depending on its window, once in as many steps (see model.kv_cache.Segments).
"""


def recent_rows(plan: CompilePlan) -> int:
    """Return the recent rows of a slot: an eighth of the shortest window, or 64."""
    return max(1, min(MOST_RECENT_ROWS, plan.decode_buckets[0] // 8))


def windows_of(part: str, plan: CompilePlan) -> tuple[int, ...]:
    """Return the windows of a decoder's graphs.

    The talker's longest replaces the thinker's: one more would add a third of the graphs.
    """
    most = plan.context_length if part == "thinker" else plan.talker_context_length
    return (*(w for w in plan.decode_buckets if w < min(most, plan.context_length)), most)


def prompt_graph(config: OmniConfig, part: str, rows: int, window: int, plan: CompilePlan) -> Graph:
    """Describe the prefill of up to `rows` rows in one slot.

    They follow its first `length` positions, and attend to `window` positions (see
    model.kv_cache.PromptState).
    """
    c, dtype = decoder_config(config, part), getattr(torch, plan.arithmetic)
    inputs = [
        TensorSpec("rows", (rows, c.hidden_size), dtype),
        TensorSpec("positions", (3, rows), torch.float32, window),
        TensorSpec("last", (1,), torch.int64, rows),
        TensorSpec("slot", (1,), torch.int64, plan.max_concurrency),
        TensorSpec("length", (1,), torch.int64, window - rows + 1),
    ]
    seen = 1
    if part == "thinker":
        layers, seen = len(config.thinker.vision.deepstack_layers), rows
        shape = (layers, rows, c.hidden_size)
        inputs.append(TensorSpec("deepstack", shape, dtype, is_optional=True))
    return Graph(
        f"{part}_prefill",
        {"rows": rows, "window": window},
        part,
        _prefill,
        tuple(inputs),
        (
            TensorSpec("logits", (1, c.vocab_size), dtype),
            TensorSpec("hidden", (seen, c.hidden_size), dtype),
        ),
        kv_cache_state(config, part, plan, window),
    )


def prompt_size(sizes: Iterable[tuple[int, ...]], start: int, rows: int) -> tuple[int, ...]:
    """Choose window and rows of the graph for the next `rows` of a prompt after `start`.

    sizes: all graphs', ascending.
    """
    fitting = [(window, size) for window, size in sizes if start + min(size, rows) <= window]
    whole = [(window, size) for window, size in fitting if size >= rows]
    # One call if a graph fits all rows; else as many as possible.
    return whole[0] if whole else max(fitting, key=lambda pair: (pair[1], -pair[0]))


def flush_graph(config: OmniConfig, part: str, window: int, plan: CompilePlan) -> Graph:
    """Describe the flush of every slot's recent rows into the first `window` positions.

    See model.kv_cache.flushed. The call may also copy a slot.
    """
    every = plan.max_concurrency
    slot = partial(TensorSpec, shape=(1,), dtype=torch.int64, below=every)
    return Graph(
        f"{part}_flush",
        {"window": window},
        part,
        _flush,
        (
            TensorSpec("held", (every,), torch.int64, window),
            TensorSpec("counts", (every,), torch.int64, recent_rows(plan) + 1),
            slot("source"),
            slot("target"),
        ),
        (),
        kv_cache_state(config, part, plan, window),
    )


def decode_graph(
    config: OmniConfig, part: str, slots: int, window: int, plan: CompilePlan
) -> Graph:
    """Describe the decode step of `slots` slots, each of which reads `window` positions.

    Its inputs have as many rows as there are slots, the first of which are computed; of the talker
    they may be the code predictor's outputs, whose codes are passed on. A row whose count is -1 is
    idle. See model.kv_cache.StepState.
    """
    c, dtype = decoder_config(config, part), getattr(torch, plan.arithmetic)
    every = plan.max_concurrency
    outputs = [TensorSpec("logits", (slots, c.vocab_size), dtype)]
    if part == "thinker":
        rows = [TensorSpec("token_ids", (every,), torch.int64, c.vocab_size)]
    else:
        assert config.talker is not None
        codes = TensorSpec("codes", (every, config.talker.code_groups), torch.int64, c.vocab_size)
        rows = [codes, TensorSpec("rows", (every, c.hidden_size), dtype)]
        outputs += [TensorSpec("hidden", (slots, c.hidden_size), dtype), codes]
    return Graph(
        f"{part}_decode",
        {"slots": slots, "window": window},
        part,
        partial(_decode, slots=slots),
        (
            *rows,
            TensorSpec("positions", (every,), torch.float32, window),
            TensorSpec("held", (every,), torch.int64, window),
            TensorSpec("counts", (every,), torch.int64, recent_rows(plan), idle=-1),
            TensorSpec("slots", (every,), torch.int64, every, idle=every),
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
    config: OmniConfig, part: str, plan: CompilePlan, window: int | None = None
) -> tuple[TensorSpec, ...]:
    """Describe one core's KV heads of a KV cache: recent rows of all slots, then segments.

    Segments end at the plan's windows, or at `window`.
    """
    c, dtype = decoder_config(config, part), getattr(torch, plan.arithmetic)
    heads = local_kv_heads(c.heads, c.kv_heads, plan.degree(part))
    ends = (0, *windows_of(part, plan))
    needed = ends[-1] if window is None else window

    def rows(name: str, count: int) -> TensorSpec:
        return TensorSpec(
            name, (plan.max_concurrency, 2 * c.layers, heads, count, c.head_dim), dtype
        )

    segments = [
        rows(f"positions.{begin}", end - begin) for begin, end in pairwise(ends) if begin < needed
    ]
    return (rows("recent", recent_rows(plan)), *segments)


def _prefill(owner: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    assert isinstance(owner, ThinkerModel | TalkerModel)
    rows, positions, last, slot, length, *visual = inputs
    recent, *segments = state
    cache = PromptState(tuple(segments), slot, length, last, len(rows))
    return owner.prefill(rows, positions, last, cache, *visual), (recent, *cache.new_state)


def _flush(_: nn.Module, inputs: tuple[Tensor, ...], state: State) -> tuple[Outputs, State]:
    recent, *segments = state
    return (), (recent, *flushed(tuple(segments), recent, *inputs))


def _decode(
    owner: nn.Module, inputs: tuple[Tensor, ...], state: State, slots: int
) -> tuple[Outputs, State]:
    assert isinstance(owner, ThinkerModel | TalkerModel)
    rows, positions, held, counts, named = (tensor[:slots] for tensor in inputs[-5:])
    recent, *segments = state
    is_all = slots == len(recent)  # row i is slot i
    cache = StepState(recent, tuple(segments), None if is_all else named, held, counts)
    outputs = owner.decode(rows, positions, cache)
    state = (cache.new_recent, *segments)
    return (*(outputs if isinstance(outputs, tuple) else (outputs,)), *inputs[:-5]), state
