"""The decompositions and FX passes of an early, public TorchNeuron, on the CPU.

Set TORCHNEURON_SOURCES to a checkout of parmoham-aws/test-repo-parmoham (April 2026, before 2.33);
then `make test-torchneuron`. Nothing of it is copied here. Without it the tests are skipped, with
the reason.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed import distributed_c10d

VARIABLE = "TORCHNEURON_SOURCES"
BACKEND = "torch_neuronx.neuron_dynamo_backend"
PACKAGES = ("torch_neuronx", BACKEND)  # without their __init__, which loads the runtime
# Imported by the passes, and called only where something is compiled for a device.
STAND_INS = (
    *("neuronxcc", "neuronxcc.nki", "neuronxcc.nki.kernels", "neuronxcc.nki.kernels.attention"),
    *("torch_mlir", "torch_mlir._mlir_libs", "torch_mlir._mlir_libs._mlir"),
    *("torch_neuronx.nki_hop", "torch_neuronx.utils"),
)
Aliases = list[tuple[int, int]]  # (output, input)


@dataclass(frozen=True)
class Passed:
    """A graph after the passes: (*inputs) -> (*renewed inputs, *outputs).

    aliases: found after AOTAutograd, for the executor. analysed: found before, for the compiler.
    groups: of the collectives. called: the inputs of its calls.
    """

    module: fx.GraphModule
    aliases: Aliases
    analysed: Aliases
    groups: set[str]
    called: list[Sequence[Tensor]]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run the graph as TorchNeuron's executor does: aliased outputs are written to inputs."""
        self.called.append(inputs)
        results = self.module(*inputs)
        for output, renewed in self.aliases:
            inputs[renewed].copy_(results[output])
        aliased = {output for output, _ in self.aliases}
        return [result for index, result in enumerate(results) if index not in aliased]


class PublicPasses:
    """A backend of torch.compile. passed: its graphs so far."""

    def __init__(self) -> None:
        """Import the sources. Raises FileNotFoundError, which says what to set, without them."""
        root = Path(os.environ.get(VARIABLE, ""))
        if not (root / BACKEND.replace(".", "/")).is_dir():
            raise FileNotFoundError(
                f"no public TorchNeuron: set {VARIABLE} to parmoham-aws/test-repo-parmoham"
            )
        self.passed: list[Passed] = []
        for name in PACKAGES:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(root / name.replace(".", "/"))]
        sys.modules.update({name: MagicMock() for name in STAND_INS})
        pipelines = f"{BACKEND}.fx.pipelines"
        self._before = import_module(f"{pipelines}.preprocessing_pipeline").preprocess_graph
        self._after = import_module(f"{pipelines}.post_aot_processing_pipeline").post_aot_processing
        decompositions = import_module(f"{BACKEND}.decompositions")
        for name in [name for name in sys.modules if name.split(".")[0] in STAND_INS + PACKAGES]:
            del sys.modules[name]  # other tests look for an installed TorchNeuron
        attend = decompositions.sdpa_fused_overrideable

        def attention(*given: Any, attn_mask: Tensor | None = None, scale: Any = None) -> Any:
            query, key, value, *rest = given
            return attend(query, key, value, attn_mask, *rest, scale=scale)[:2]

        # A device has _scaled_dot_product_fused_attention_overrideable in its place.
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        self._table = {**decompositions.get_compile_decomposition_table(), on_cpu: attention}

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Pass a graph."""
        module, before = self._before(module)

        def compile_graph(module: fx.GraphModule, _: object) -> Any:
            result, after = self._after(module)
            found = after["mutation_info"], before["aliasing_analysis"]
            final, early = [[(a.output_index, a.parameter_number) for a in each] for each in found]
            self.passed.append(Passed(result, final, early, _rename_groups(result), []))
            return make_boxed_func(self.passed[-1])

        options: Any = {"fw_compiler": compile_graph, "decompositions": self._table}
        return aot_autograd(keep_inference_input_mutations=True, **options)(module, inputs)


def _rename_groups(module: fx.GraphModule) -> set[str]:
    """Give collectives torch's name of the default group again. Returns the names they had."""
    found = set()
    for node in module.graph.nodes:
        if "_c10d_functional" in str(node.target) and len(node.args) > 1:
            found.add(node.args[-1])
            group = distributed_c10d._get_default_group().group_name
            node.args = (*node.args[:-1], group)
    module.recompile()
    return found
