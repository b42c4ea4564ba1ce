"""Graphs of code2wav whose state has a line for every slot, of which a call names some."""

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.config import Code2WavConfig
from qwen3_omni_neuron.graphs.graph import Graph, Outputs, State, TensorSpec
from qwen3_omni_neuron.graphs.speech import vocoder_state

LINES = 3


def slot_graphs(
    c: Code2WavConfig, sizes: list[tuple[int, int]], dtype: torch.dtype, kv_heads: int
) -> list[Graph]:
    """Start and step for each of `sizes`, (slots, frames): of the same inputs."""
    state = vocoder_state(c, LINES, dtype, kv_heads)
    graphs = []
    for slots, frames in sizes:
        inputs = (
            TensorSpec("codes", (slots, c.code_groups, frames), torch.int64, c.codebook_size),
            TensorSpec("slots", (slots,), torch.int64, LINES),
        )
        for name, call, less in (("start", _start, c.latency_samples), ("step", _step, 0)):
            samples = TensorSpec("samples", (slots, frames * c.frame_samples - less), dtype)
            bucket = {"slots": slots, "frames": frames}
            label = f"code2wav_{name}"
            graphs.append(Graph(label, bucket, "code2wav", call, inputs, (samples,), state))
    return graphs


def _start(owner: nn.Module, inputs: tuple[Tensor, ...], lines: State) -> tuple[Outputs, State]:
    codes, slots = inputs
    samples, new = owner.start(codes)
    return (samples,), _put(lines, slots, new)


def _step(owner: nn.Module, inputs: tuple[Tensor, ...], lines: State) -> tuple[Outputs, State]:
    codes, slots = inputs
    samples, new = owner.step(codes, tuple(line.index_select(0, slots) for line in lines))
    return (samples,), _put(lines, slots, new)


def _put(lines: State, slots: Tensor, new: State) -> State:
    return tuple(old.index_copy(0, slots, line) for old, line in zip(lines, new, strict=True))
