"""A compiled graph in torch-mlir, as TorchNeuron brings it there.

torch-mlir's importer and passes are those that `iree-base-compiler` carries. Source for the order:
aws-neuron/torch-neuronx v2.33.0, torch_neuronx/neuron_dynamo_backend/fx/fx_transform.py, without
its own pass between the import and the pipeline, which is not public.
"""

import copy
from typing import Any

import torch
from torch import fx

PIPELINE = "builtin.module(torchdynamo-export-to-torch-backend-pipeline)"


def imported(module: fx.GraphModule) -> Any:
    """Import a graph into the torch dialect, and lower it to the form that backends take.

    What it renews comes out as its first outputs. Returns the MLIR module; raises what the importer
    and the passes raise.
    """
    from iree.compiler.extras.fx_importer import FxImporter
    from iree.compiler.passmanager import PassManager

    importer = FxImporter()
    importer.import_stateless_graph(with_renewed_as_outputs(module).graph, func_name="main")
    with importer.module.context:
        PassManager.parse(PIPELINE).run(importer.module.operation)
    return importer.module


def with_renewed_as_outputs(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose last copies to inputs are outputs, as TorchNeuron makes them aliases."""
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
