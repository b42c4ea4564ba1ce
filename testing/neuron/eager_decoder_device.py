"""A stand-in for the Neuron compiler and runtime that keeps torch's own graphs, for one core.

NxDI's own compile, save and load run, except for the closed parts:

    generate_hlo           traces the module with torch.fx instead of XLA; its "HLO" is TorchScript
    neuron_xla_compile,    return the HLO's bytes as the NEFF
    neuron_xla_wlo_compile
    ModelBuilder.build_nxd_model    returns EagerModel instead of NxDModel, which consists of the
                                    runtime's own C++ classes; both route by shape
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx


class EagerModel(nn.Module):
    """Stand-in for NxDModel. graphs: (weights, states, inputs) -> outputs, states."""

    def __init__(
        self,
        graphs: dict[str, Any],
        routes: dict[str, str],
        weights: list[str],
        states: dict[str, Tensor],
    ):
        super().__init__()
        self.graphs = nn.ModuleDict(graphs)
        self.routes = routes
        self.weight_names = weights
        self.weights: list[Tensor] = [torch.zeros(0)]
        self.states: list[Tensor] = list(states.values())
        self.initialized = False

    @torch.jit.export
    def initialize(self, checkpoint: list[dict[str, Tensor]], start_rank: Tensor) -> None:
        self.weights = [checkpoint[0][name] for name in self.weight_names]
        self.initialized = True

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        wanted = str([tensor.shape for tensor in inputs])
        if wanted not in self.routes:
            raise ValueError("no graph for inputs of " + wanted)
        if not self.initialized:
            return [torch.zeros(0), torch.zeros(0)]
        results: list[Tensor] = []
        for name, graph in self.graphs.items():
            if name == self.routes[wanted]:
                results = graph(self.weights, self.states, inputs)
        self.states = results[2:]
        return results[:2]


def generate_hlo(
    module: nn.Module, inputs: Any, aliases: dict[Tensor, int], **_options: object
) -> SimpleNamespace:
    """Trace a module; return the attributes of HloArtifacts that NxD's builder reads."""
    named = dict(module.named_parameters())
    names = {id(tensor): name for name, tensor in named.items()}
    states = [names[id(tensor)] for tensor in aliases]
    assert list(aliases.values()) == list(range(2, 2 + len(aliases)))
    weights = [name for name in named if name not in states]

    def run(held: list[Tensor], renewed: list[Tensor], given: list[Tensor]) -> list[Tensor]:
        state = dict(zip(weights, held, strict=True)) | dict(zip(states, renewed, strict=True))
        return list(torch.func.functional_call(module, state, tuple(given)))

    example = ([named[n].data for n in weights], [named[n].data for n in states], list(inputs))
    with torch.no_grad():
        operations = make_fx(run)(*example)  # torch.jit alone leaves sizes open
        for node in operations.graph.find_nodes(
            op="call_function", target=torch.ops.aten.full.default
        ):
            shape, value = node.args
            if isinstance(value, bool):  # which TorchScript has no `full` of
                node.args, node.kwargs = (shape, int(value)), {**node.kwargs, "dtype": torch.bool}
        operations.recompile()
        graph = torch.jit.trace(operations, example, strict=False, check_trace=False)
    written = io.BytesIO()
    torch.jit.save(graph, written)
    main = SimpleNamespace(id=0, instructions=[])
    hlo = SimpleNamespace(
        computations=[main],
        entry_computation_id=0,
        frontend_attributes=SimpleNamespace(map={}),
        SerializeToString=written.getvalue,
    )
    return SimpleNamespace(
        hlo_module=hlo,
        metaneff=SimpleNamespace(SerializeToString=lambda: b""),
        weight_name_to_idx={name: index for index, name in enumerate(weights)},
        states={name: torch.zeros_like(named[name].data) for name in states},
    )


def build_nxd_model(builder: Any) -> Any:
    from neuronx_distributed.trace.spmd import NxDModelExecutor

    graphs: dict[str, Any] = {}
    routes: dict[str, str] = {}
    example = None
    for key, held in builder.model_collection.items():
        for bucket, inputs in enumerate(held.example_inputs):
            name = f"{key}_{bucket}"
            graphs[name] = torch.jit.load(held.neff_artifact_collection[bucket].neff_filename)
            shapes = str([list(tensor.shape) for tensor in inputs])
            assert shapes not in routes, f"{name} and {routes[shapes]} can't be told apart"
            routes[shapes] = name
            example = inputs
    first = next(iter(builder.model_collection.values())).hlo_artifact_collection[0]
    model = torch.jit.script(
        EagerModel(graphs, routes, list(first.weight_name_to_idx), first.states)
    )
    return torch.jit.trace(NxDModelExecutor(model), example, strict=False, check_trace=False)


@contextmanager
def eager_device() -> Iterator[list[str]]:
    """Replace the closed parts. Yields the flags of every graph that is compiled in the block."""
    import torch_neuronx
    from neuronx_distributed.trace import model_builder

    flags: list[str] = []

    def compile_hlo(module_bytes: bytes, compiler_flags: str, **_options: object) -> bytes:
        flags.append(compiler_flags)
        return module_bytes

    def compile_first(module_bytes: bytes, compiler_flags: str, **options: object) -> Any:
        return compile_hlo(module_bytes, compiler_flags), b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_neuronx.xla_impl.trace, "generate_hlo", generate_hlo)
        patch.setattr(model_builder, "hlo_debug", lambda **_options: nullcontext())
        patch.setattr(model_builder, "neuron_xla_compile", compile_hlo)
        patch.setattr(model_builder, "neuron_xla_wlo_compile", compile_first)
        patch.setattr(model_builder.ModelBuilder, "build_nxd_model", build_nxd_model)
        yield flags
