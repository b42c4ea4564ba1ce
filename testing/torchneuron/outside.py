"""Counter of operations on the device outside of graphs, each of which TorchNeuron would compile.

The stand-in's device is a CPU of its own number. torch computes there as on the CPU, and tensors
don't say where they are: their storages are remembered.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from testing.torchneuron.backend import Refused

DEVICE = torch.device("cpu", 1)
COPIES = ("copy_", "_to_copy")
Compiled = Callable[..., Sequence[Tensor]]


class OutsideGraphs(TorchDispatchMode):
    """Count the operations on the device by name, and refuse those that are compiled.

    Allocations, views and copies from and to the host are not, if the copies keep type and layout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._storages: set[StorageWeakRef] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given, options = list(_tensors((args, kwargs))), kwargs or {}
        there = [tensor for tensor in given if self._is_there(tensor)]
        results = operation(*args, **options)
        name = operation._schema.name.removeprefix("aten::")
        if options.get("device") == DEVICE:
            self.add(results)
        elif not there:
            return results
        self.counts[name] += 1
        kinds = {tensor.dtype for tensor in (*given, *_tensors(results))}
        is_copy = name in COPIES and len(kinds) == len(there) == 1
        if name == "copy_":
            is_copy &= there[0] is given[0] and given[0].is_contiguous()
        if not (is_copy or operation.is_view or (name == "empty" and not there)):
            raise Refused(f"{name} runs on the device outside of graphs")
        return results

    def add(self, tensors: Any) -> None:
        """Count tensors as the device's."""
        added = {StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors(tensors)}
        self._storages = added | {held for held in self._storages if not held.expired()}

    def compiler(self, compile_module: Callable[..., Compiled]) -> Callable[..., Compiled]:
        """Return a function that compiles modules whose calls are not counted."""

        def call(compiled: Compiled, *tensors: Tensor) -> Sequence[Tensor]:
            assert all(map(self._is_there, tensors)), "an input is on the host"
            with _disable_current_modes():
                outputs = compiled(*tensors)
            self.add(outputs)
            return outputs

        def compiling(module: nn.Module, tensors: Sequence[Tensor]) -> Compiled:
            with _disable_current_modes():
                return partial(call, compile_module(module, tensors))

        return compiling

    def _is_there(self, tensor: Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._storages


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))
