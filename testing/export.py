"""Graphs through torch.export, which shows that their shapes and their control flow are fixed."""

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from qwen3_omni_neuron.neuron.graphs.graph import Graph

# neuronx-cc has no sort; counting and searching give shapes that depend on the data. A transposed
# convolution becomes one over zeros between the inputs, and as_strided a gather of single numbers.
REJECTED_OPS = frozenset(
    {"sort", "argsort", "msort", "nonzero", "bincount", "unique", "unique2", "multinomial"}
    | {"conv_transpose1d", "as_strided"}
)


def export_graph(graph: Graph, owner: nn.Module) -> ExportedProgram:
    """Trace a graph over its part with every size fixed.

    owner: the part, on the CPU. Raises what torch.export raises where Python branches on a value
    of a tensor.
    """
    with torch.no_grad():
        return torch.export.export(graph.module(owner).eval(), graph.example(), strict=False)


def open_shapes(program: ExportedProgram) -> list[str]:
    """Return the values of a program whose shape is not fixed; none in a static graph."""
    found = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, torch.SymInt | torch.SymFloat | torch.SymBool):
                found.append(f"{node.name}: {tensor}")
            elif isinstance(tensor, Tensor) and not all(type(n) is int for n in tensor.shape):
                found.append(f"{node.name}: {list(tensor.shape)}")
    return found


def rejected_ops(program: ExportedProgram) -> list[str]:
    """Return the operations of a program that Neuron's compiler rejects or makes expensive.

    They are REJECTED_OPS, running sums of floats, and complex or float64 values.
    """
    found = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        name = getattr(node.target, "_schema", node.target).__str__().split("(")[0]
        name = name.removeprefix("aten::").split(".")[0]
        value = node.meta.get("val")
        kind = value.dtype if isinstance(value, Tensor) else None
        if name in REJECTED_OPS:
            found.append(f"{node.name}: {name}")
        elif name == "cumsum" and kind is not None and kind.is_floating_point:
            found.append(f"{node.name}: cumsum of {kind}")
        elif kind is not None and (kind.is_complex or kind == torch.float64):
            found.append(f"{node.name}: {kind}")
    return found
