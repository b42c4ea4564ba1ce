"""The slots of a decoder over graphs: which graph a call takes, without computing it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qwen3_omni_neuron.neuron.graphs.all import all_graphs
from qwen3_omni_neuron.neuron.part import LoadedPart, device_type
from qwen3_omni_neuron.neuron.slots import GraphSlots
from testing.graph_cases import TINY_PLAN

RECENT = 2  # rows of a slot, an eighth of the shortest window


@pytest.fixture
def called() -> list[str]:
    return []


@pytest.fixture
def slots(config, called) -> GraphSlots:
    """The talker's three slots, in windows of 16 and 64 positions. Outputs are zeros."""
    plan = replace(TINY_PLAN, target="torchneuron")
    graphs = {g.label: g for g in all_graphs(config, plan) if g.part == "talker"}

    def run(label: str, _: dict[str, Tensor]) -> list[Tensor]:
        called.append(label)
        outputs = graphs[label].outputs
        return [torch.zeros(spec.shape, dtype=device_type(spec.dtype)) for spec in outputs]

    return GraphSlots(LoadedPart(graphs.values(), run), "talker")


def test_a_flush_takes_the_window_of_the_slots_that_are_full(config, slots, called) -> None:
    """A long slot beside them has room: its own window is not renewed."""
    width = config.talker.text.hidden_size
    for slot, rows in ((0, 5), (1, 30)):
        slots.prefill(slot, torch.zeros(rows, width), torch.zeros(3, rows))
    for _ in range(RECENT):
        slots.step([0], torch.zeros(1, width))
    called.clear()
    slots.step([0, 1], torch.zeros(2, width))
    assert called == ["talker_flush[window=16]", "talker_decode[slots=3,window=64]"]
