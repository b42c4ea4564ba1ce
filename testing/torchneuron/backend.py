"""A stand-in for TorchNeuron's backend of torch.compile, registered under its name.

Like TorchNeuron's (aws-neuron/torch-neuronx v2.33.0, torch_neuronx/neuron_dynamo_backend/), it is
AOTAutograd with `keep_inference_input_mutations=True` and a table of decompositions; torch runs the
result on the CPU. It refuses what TorchNeuron would refuse, run on the CPU, or copy, and what the
device computes in other types than torch does. `Refused` lists the cases.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from qwen3_omni_neuron.neuron.torchneuron.environment import COMPILE_ONLY, OPT_LEVEL, SETTINGS
from testing.torchneuron.supported import (
    DECOMPOSED,
    INDEX_SOURCES,
    MOVES,
    SUPPORTED,
    WRITTEN_DECOMPOSITIONS,
)

CACHED = {
    "TORCH_NEURONX_NEFF_CACHE_DIR": ".neff",
    "TORCH_NEURONX_HLO_CACHE_DIR": ".hlo",
    "NKI_COMPILE_CACHE_URL": ".nki",
}
"""The caches that must have a graph, by the variables of their folders: the files' endings."""
COMPILED: list[str] = []
"""Keys of the graphs that this process compiled because a cache did not have them."""
SEEN: Counter[str] = Counter()
"""Operations of all graphs so far, after the decompositions."""
FURTHER: list[Callable[[fx.GraphModule], object]] = []
"""Further checks of each graph, after the decompositions."""
MOST_INPUTS = 64
"""Inputs, weights and state that a graph may have: a call takes time for each."""


class Refused(Exception):  # noqa: N818
    """The graph has something that TorchNeuron or the device does not support.

    - symbolic sizes (fx/passes/dynamic_shape_analysis.py), and results whose size is data;
    - float64 and complex numbers; int64 that is computed with. Casts, and indices as top-k, argmax
      have them, are int64 in torch and int32 on the device;
    - more than MOST_INPUTS inputs;
    - a renewed input that would be copied back, or that is renewed but by one last copy_;
    - an operation that no decomposition removes and no lowering is known for.
    """


def neuron_backend(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compile one graph."""
    assert not options, options
    for name, value in SETTINGS.items():
        if os.environ.get(name) != value:
            raise Refused(f"{name} is {os.environ.get(name)!r} and not {value!r}")
    _check_sizes(inputs)
    _check_types(module)
    table: dict[Any, Any] = {**get_decompositions(DECOMPOSED), **WRITTEN_DECOMPOSITIONS}
    aot = aot_autograd(
        fw_compiler=_compile, keep_inference_input_mutations=True, decompositions=table
    )
    return aot(module, inputs)


@cache
def register() -> None:
    """Register the backend in torch.compile's table."""
    register_backend(neuron_backend, name="neuron")


def _compile(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    _check_sizes(inputs)
    if len(inputs) > MOST_INPUTS:
        raise Refused(f"{len(inputs)} inputs, more than {MOST_INPUTS}")
    _check_mutations(module)
    _check_operations(module)
    for check in FURTHER:
        check(module)
    _find_or_compile(module)
    if os.environ.get("TORCH_NEURONX_COMPILE_ONLY") == COMPILE_ONLY["TORCH_NEURONX_COMPILE_ONLY"]:
        return make_boxed_func(lambda *_: _unset_outputs(module))
    return make_boxed_func(module.forward)


def _values(node: fx.Node) -> Iterator[Any]:
    yield from tree_leaves(node.meta.get("val", node.meta.get("example_value")))


def _check_sizes(inputs: Sequence[Any]) -> None:
    for value in inputs:
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        if not all(type(size) is int for size in sizes):
            raise Refused(f"a symbolic size: {value}")


def _check_types(module: fx.GraphModule) -> None:
    """Check the graph that was captured, where the arithmetic is still the model's own."""
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        name = node.target if isinstance(node.target, str) else node.target.__name__
        name = name.partition(".")[0]  # of an overload such as add.Tensor
        for value in _values(node):
            if isinstance(value, Tensor) and (
                value.dtype == torch.float64 or value.dtype.is_complex
            ):
                raise Refused(f"{name} computes {value.dtype}: {node.stack_trace}")
        if name in MOVES or name in INDEX_SOURCES:
            continue
        operands = [value for given in node.all_input_nodes for value in _values(given)]
        results = list(_values(node))
        integers = [v for v in results if isinstance(v, Tensor) and v.dtype == torch.int64]
        compared = [v for v in operands if isinstance(v, Tensor) and v.dtype == torch.int64]
        indexes = name.startswith(("index_", "gather", "scatter", "embedding", "getitem"))
        if integers or (compared and not indexes):
            raise Refused(f"{name} computes with int64: {node.stack_trace}")


def _check_operations(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target.__name__ == "getitem":
            continue
        operation = str(node.target)
        SEEN[operation] += 1
        if operation not in SUPPORTED:
            raise Refused(f"{operation} is left, and no lowering of it is known")
        for value in _values(node):
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise Refused(f"{operation} gives a size or a number that is data")
            if isinstance(value, Tensor) and not all(type(n) is int for n in value.shape):
                raise Refused(f"the size of {operation}'s result is data")


def _check_mutations(module: fx.GraphModule) -> None:
    context = TracingContext.try_get()
    assert context is not None and context.fw_metadata is not None
    copied_back = context.fw_metadata.mutated_inp_runtime_indices
    if copied_back:
        raise Refused(f"inputs {copied_back} would be copied back after every call")
    renewed = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not node.target._schema.is_mutable:
            continue
        target = node.args[0]
        if node.target is not torch.ops.aten.copy_.default or target.op != "placeholder":
            raise Refused(f"{node.target} changes {target} in place")
        if target in renewed:
            raise Refused(f"{target} is renewed twice")
        renewed.add(target)


def _find_or_compile(module: fx.GraphModule) -> None:
    """Look a graph up in the caches of the process, and add what is missing."""
    text = f"{os.environ.get(OPT_LEVEL)}\n{_text(module)}"  # its flags are in a NEFF's key
    key, found = hashlib.sha256(text.encode()).hexdigest(), True
    for variable, suffix in CACHED.items():
        folder = os.environ.get(variable)
        path = None if folder is None else Path(folder) / key[:2] / key[2:4] / f"{key}{suffix}"
        if path is not None and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write = write_neff if suffix == ".neff" else Path.write_text
            write(path, text)
            found = False
        found &= path is not None
    if not found:
        COMPILED.append(key)


def write_neff(path: Path, text: str) -> None:
    """Write what stands for a NEFF; a test may replace this function."""
    path.write_text(text)


def _text(module: fx.GraphModule) -> str:
    """Return everything that a NEFF depends on: operations, shapes, and groups as rank lists.

    A group's name may differ from process to process (fx/passes/collective_legalization.py).
    """
    names: dict[fx.Node, str] = {}
    lines = []
    for index, node in enumerate(module.graph.nodes):
        names[node] = f"%{index}"
        kinds = [f"{v.dtype}{list(v.shape)}" for v in _values(node) if isinstance(v, Tensor)]
        given = fx.map_arg((node.args, node.kwargs), lambda n: names[n])
        if "_c10d_functional" in str(node.target) and isinstance(node.args[-1], str):
            name: Any = node.args[-1]
            group = distributed_c10d._resolve_process_group(name)
            given = (given[0][:-1], distributed_c10d.get_process_group_ranks(group))
        lines.append(f"{names[node]} {node.op} {_stable(node)} {given} {kinds}")
    return "\n".join(lines)


def _stable(node: fx.Node) -> str:
    return "" if node.op in ("placeholder", "output") else str(node.target)


def _unset_outputs(module: fx.GraphModule) -> list[Any]:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return [
        torch.empty(tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype)
        for node in output.args[0]
    ]


@contextmanager
def standing_in() -> Iterator[None]:
    """Register `backend="neuron"`, with TorchNeuron's settings, until the block ends."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    register()
    try:
        yield
    finally:
        torch.compiler.reset()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
