"""A compiled graph in torch-mlir, lowered as TorchNeuron lowers it.

torch-mlir's importer and passes are those that `iree-base-compiler` carries. Source for the order:
aws-neuron/torch-neuronx v2.33.0, torch_neuronx/neuron_dynamo_backend/fx/fx_transform.py, without
its own pass between the import and the pipeline, which is not public.
"""

import copy
import tempfile
from collections import Counter
from typing import Any

import torch
from torch import fx

PIPELINE = "torchdynamo-export-to-torch-backend-pipeline"
COLLECTIVES = "torch._c10d_functional."
# torch-mlir has no operations for collectives. The importer makes each a torch.operator, which the
# pipeline refuses until a library says that it changes none of its operands.
# Source: llvm/torch-mlir, lib/Dialect/Torch/Transforms/ReduceOpVariants.cpp.
LIBRARY = "\n".join(
    f'func.func private @"__torch_mlir_has_value_semantics_fn.{COLLECTIVES}{name}"()'
    for name in ("all_reduce", "all_gather_into_tensor", "wait_tensor")
)


def imported(module: fx.GraphModule) -> Any:
    """Import a graph into the torch dialect, and lower it to the form that backends take.

    Renewed inputs are its first outputs. Collectives stay torch.operator. Returns the MLIR module;
    raises the errors of the importer and the passes.
    """
    from iree.compiler.extras.fx_importer import FxImporter
    from iree.compiler.passmanager import PassManager

    importer = FxImporter()
    importer.import_stateless_graph(with_renewed_as_outputs(module).graph, func_name="main")
    with importer.module.context, tempfile.NamedTemporaryFile("w", suffix=".mlir") as library:
        library.write(LIBRARY)
        library.flush()
        pipeline = f"builtin.module({PIPELINE}{{extra-library={library.name}}})"
        PassManager.parse(pipeline).run(importer.module.operation)
    return importer.module


def collectives_of(module: fx.GraphModule) -> Counter[str]:
    """Count the collectives of a graph, named as they are in its MLIR module."""
    called = [str(node.target) for node in module.graph.nodes]
    names = [f"torch.{name.removesuffix('.default')}" for name in called]
    return Counter(name for name in names if name.startswith(COLLECTIVES))


def with_renewed_as_outputs(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that returns its last copies to inputs, as TorchNeuron makes them aliases."""
    changed = copy.deepcopy(module)
    graph = changed.graph
    renewed = []
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            renewed.append(node.args[1])
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    (output,) = (node for node in graph.nodes if node.op == "output")
    output.args = ((*renewed, *output.args[0]),)
    changed.recompile()
    return changed
