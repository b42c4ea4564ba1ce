"""Every graph of target torchneuron in torch-mlir: imported, and lowered to what backends take."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from qwen3_omni_neuron.graphs.all import PARTS
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.part import part_spec, to_device_type
from qwen3_omni_neuron.neuron.torchneuron.graph import Compilations
from qwen3_omni_neuron.neuron.torchneuron.part import PartGraphs
from testing.graph_cases import TINY_PLAN
from testing.torchneuron import backend
from testing.torchneuron.process import standing_in
from testing.torchneuron.torch_mlir import imported

pytest.importorskip("iree.compiler", reason="torch-mlir is not installed: nothing was imported")


@pytest.fixture(scope="module")
def modules() -> Iterator[list[Any]]:
    """The MLIR modules of the graphs that are compiled."""
    made: list[Any] = []

    def check(module: fx.GraphModule) -> None:
        made.append(imported(module))

    with standing_in():
        backend.FURTHER.append(check)
        yield made
        backend.FURTHER.remove(check)


@pytest.mark.parametrize("part", PARTS)
def test_every_graph_is_imported_and_lowered(
    modules: list[Any], part: str, config: OmniConfig
) -> None:
    spec, before = part_spec(config, TINY_PLAN, part), len(modules)
    graphs = PartGraphs(spec, torch.device("cpu"), Compilations())
    for graph in spec.graphs:
        inputs = {s.name: to_device_type(s.idle_input()) for s in graph.inputs}
        graphs.run(graph.label, inputs)
        assert ",f64>" not in str(modules[-1]), graph.label
    assert len(modules) - before == len(spec.graphs)


def test_an_operation_that_torch_mlir_lacks_is_seen() -> None:
    module = make_fx(lambda x: (torch.linalg.svd(x).S,))(torch.ones(2, 2))
    with pytest.raises(Exception, match="_linalg_svd"):
        imported(module)
