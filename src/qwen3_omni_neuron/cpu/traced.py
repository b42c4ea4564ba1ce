"""Graphs for the CPU: a model's function traced once, so that a step costs no Python."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.engines.inputs import Numbers
from qwen3_omni_neuron.model.kv_cache import KvCache, LineCache, SlotCache
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker


class _Graph(nn.Module):
    """A function of a module as a module's forward: what the tracer and the freezer take."""

    def __init__(self, owner: nn.Module, function: Callable[..., Any]):
        super().__init__()
        self.owner = owner
        self._function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(*inputs)


def trace_graph(
    owner: nn.Module, function: Callable[..., Any], *example: Tensor
) -> Callable[..., Any]:
    """Trace `function`, a method of `owner` or a partial of it, on an example of its inputs.

    An axis that `function` reads as a Python number is static, as it is in a compiled graph, and
    what the tracer warns of (a branch on a shape) is meant. An axis that it never reads so, such
    as the KV window or a chunk of the vocoder's, may be of any length in later calls. Weights are
    held by reference, not copied.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", category=torch.jit.TracerWarning)
        # PyTorch points from TorchScript to torch.export, whose CPU path needs a C++ compiler and
        # over a minute for the graphs that this traces in a second.
        warnings.simplefilter("ignore", category=DeprecationWarning)
        graph = torch.jit.trace(_Graph(owner, function).eval(), example, check_trace=False)
        frozen = torch.jit.freeze(graph)

    def run(*inputs: Tensor) -> Any:
        # Its optimizer takes a second on the first calls and gains nothing here.
        with torch.jit.optimized_execution(False):
            return frozen(*inputs)

    return run


class DecodeGraphs:
    """The model's `decode` over a KV cache, traced for one slot and for several.

    example: its first input, for one slot.
    """

    def __init__(self, model: Thinker | Talker, cache: KvCache, example: Tensor):
        slots, positions = cache.keys.shape[1], cache.keys.shape[3]
        self._cache, self._number = cache, Numbers(positions)

        def decode_one(row: Tensor, position: Tensor, length: Tensor, *cache: Tensor) -> Any:
            return model.decode(row, position, LineCache(KvCache(*cache), length))

        def decode_many(
            rows: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, *cache: Tensor
        ) -> Any:
            return model.decode(rows, positions, SlotCache(KvCache(*cache), slots, lengths))

        window = cache.lines(0, 1).window(2)
        self._one = trace_graph(
            model, decode_one, example, torch.ones(1), self._number(1), window.keys, window.values
        )
        if slots > 1:
            two, window = torch.tensor([0, 1]), cache.window(2)
            self._many = trace_graph(
                model, decode_many, torch.cat((example, example)), torch.ones(2), two, two,
                window.keys, window.values,
            )  # fmt: skip

    def __call__(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[float],
        inputs: Tensor,
    ) -> Any:
        """See cpu.slots.Decode."""
        where = torch.tensor(positions)
        if len(slots) == 1:
            slot, length = slots[0], lengths[0]
            window = self._cache.lines(slot, slot + 1).window(length + 1)
            return self._one(inputs, where, self._number(length), window.keys, window.values)
        window = self._cache.window(max(lengths) + 1)
        return self._many(
            inputs, where, torch.tensor(slots), torch.tensor(lengths), window.keys, window.values
        )
