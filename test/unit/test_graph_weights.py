"""Weights on the device: few tensors, each weight a contiguous view of one of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.neuron.graphs import weights
from qwen3_omni_neuron.neuron.graphs.all import PARTS
from qwen3_omni_neuron.neuron.graphs.layers import Alone
from qwen3_omni_neuron.neuron.graphs.weights import Weights
from qwen3_omni_neuron.neuron.part import part_spec
from qwen3_omni_neuron.neuron.shards import PartShare
from testing.released import RELEASED
from testing.repeats import again
from testing.specs import plan_of
from testing.torchneuron.backend import MOST_INPUTS

CPU = torch.device("cpu")


class Owner(nn.Module):
    """Matrices of two shapes and types, and small weights and constants of several."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 6) for _ in range(5))
        self.wide = nn.Linear(6, 4)
        self.int8 = nn.Parameter(torch.randint(-9, 9, (6, 4)).to(torch.int8), requires_grad=False)
        self.matrix = nn.Parameter(torch.randn(2, 3))
        self.register_buffer("numbers", torch.arange(3, dtype=torch.int32))


@pytest.fixture
def owner() -> Owner:
    torch.manual_seed(0)
    return Owner()


@pytest.mark.parametrize(
    ("most", "shapes"),
    [
        (2**31, [(5, 6, 4), (1, 4, 6), (1, 6, 4), (5 * 6 + 4 + 6,), (3,)]),
        (60, [(2, 6, 4), (2, 6, 4), (1, 6, 4), (1, 4, 6), (1, 6, 4), (5 * 6 + 4 + 6,), (3,)]),
    ],
)
def test_every_weight_is_a_contiguous_view_of_few_tensors(owner, monkeypatch, most, shapes) -> None:
    monkeypatch.setattr(weights, "SMALL", 24)
    monkeypatch.setattr(weights, "MOST_ELEMENTS", most)
    held = Weights(owner, CPU)
    assert sorted(tuple(t.shape) for t in held.tensors) == sorted(shapes)
    views = held.views(held.tensors)
    expected = dict([*owner.named_parameters(), *owner.named_buffers()])
    assert views.keys() == expected.keys()
    for name, tensor in expected.items():
        assert views[name].dtype == tensor.dtype
        assert torch.equal(views[name], tensor), name
        assert views[name].is_contiguous(), name
    others = [torch.zeros_like(t) for t in held.tensors]
    assert not any(view.any() for view in held.views(others).values())


@pytest.mark.parametrize("tp", [again(1), again(4), 8])
@pytest.mark.parametrize("dtype", ["int8", again("bfloat16")])
def test_the_released_graphs_have_few_inputs_below_the_devices_limit(dtype, tp) -> None:
    """Counted with every weight of the part, of which a graph may use some."""
    plan = replace(plan_of(Path(), RELEASED, "torchneuron", tp=8, dtype=dtype), tp=Degrees.same(tp))
    for part in PARTS:
        spec = part_spec(RELEASED, plan, part)
        held = Weights(PartShare(spec, Alone()).owner, torch.device("meta"))
        assert max(tensor.numel() for tensor in held.tensors) < 2**31
        given = max(len(graph.inputs) + len(graph.state) for graph in spec.graphs)
        assert given + len(held.tensors) <= MOST_INPUTS, part
