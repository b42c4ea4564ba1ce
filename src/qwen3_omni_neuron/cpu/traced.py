"""Traced torch graphs of what is not in C: functions of model/ that run without Python."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.engines.inputs import Numbers
from qwen3_omni_neuron.model.kv_cache import KvCache, SingleSlotCache, SlotCache
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker


def trace_graph(
    owner: nn.Module, function: Callable[..., Any], *example: Tensor
) -> Callable[..., Any]:
    """Trace `function`, a method of `owner` or a partial of it, on an example of its inputs.

    An axis whose length `function` reads as a Python number keeps the length of the example, as in
    a compiled graph: branches on shapes, of which the tracer warns, are intended. Any other axis,
    such as the KV window or a vocoder chunk's frames, may have another length in later calls.
    Weights are held by reference, not copied.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", category=torch.jit.TracerWarning)
        # The warning recommends torch.export, whose CPU path needs a C++ compiler and more than a
        # minute for graphs that are traced here in a second.
        warnings.simplefilter("ignore", category=DeprecationWarning)
        graph = torch.jit.trace(_Graph(owner, function).eval(), example, check_trace=False)
        frozen = torch.jit.freeze(graph)

    def run(*inputs: Tensor) -> Any:
        # TorchScript's optimizer takes a second on the first calls and makes these no faster.
        with torch.jit.optimized_execution(False):
            return frozen(*inputs)

    return run


class DecodeGraphs:
    """Decode step of thinker or talker over a KV cache, traced for one slot and for several.

    The caches of model.kv_cache that the graphs hold write the new keys and values, in place.
    example: the first input of the model's `decode`, for one slot.
    """

    def __init__(self, model: Thinker | Talker, cache: KvCache, example: Tensor):
        slots, positions = cache.keys.shape[1], cache.keys.shape[3]
        self._cache, self._number = cache, Numbers(positions)

        def decode_one(row: Tensor, position: Tensor, length: Tensor, *cache: Tensor) -> Any:
            return model.decode(row, position, SingleSlotCache(KvCache(*cache), length))

        def decode_many(
            rows: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, *cache: Tensor
        ) -> Any:
            return model.decode(rows, positions, SlotCache(KvCache(*cache), slots, lengths))

        window = cache.slots(0, 1).window(2)
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
        """Append one row to each slot; see cpu.slots.Decode."""
        where = torch.tensor(positions)
        if len(slots) == 1:
            slot, length = slots[0], lengths[0]
            window = self._cache.slots(slot, slot + 1).window(length + 1)
            return self._one(inputs, where, self._number(length), window.keys, window.values)
        window = self._cache.window(max(lengths) + 1)
        return self._many(
            inputs, where, torch.tensor(slots), torch.tensor(lengths), window.keys, window.values
        )


class _Graph(nn.Module):
    """Module whose forward is a given function: torch.jit.freeze takes modules only."""

    def __init__(self, owner: nn.Module, function: Callable[..., Any]):
        super().__init__()
        self.owner = owner
        self._function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(*inputs)
