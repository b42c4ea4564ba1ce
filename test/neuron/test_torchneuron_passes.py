"""Every kind of graph through the passes of an early, public TorchNeuron."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.neuron.graphs.all import PARTS
from qwen3_omni_neuron.neuron.graphs.weights import Weights
from qwen3_omni_neuron.neuron.part import part_spec, to_device_type
from qwen3_omni_neuron.neuron.shards import PartShare, read_part_shard, write_part_shards
from qwen3_omni_neuron.neuron.torchneuron import graph as graph_module
from qwen3_omni_neuron.neuron.torchneuron.graph import DEVICE_TYPES, CompiledGraph, group_of
from qwen3_omni_neuron.neuron.torchneuron.runtime import make_fake_group
from testing.graph_cases import TINY_PLAN
from testing.torchneuron.leaner import write_leaner_checkpoint
from testing.torchneuron.public_passes import PublicPasses

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def passes() -> PublicPasses:
    try:
        return PublicPasses()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_leaner_checkpoint(tmp_path_factory.mktemp("leaner"))


@pytest.fixture(scope="module", params=[1, 2])
def ranks(passes, request) -> Iterator[int]:
    """Their number. The first is here; of two, the collectives do nothing, before and after."""
    make_fake_group(request.param)
    yield request.param
    if request.param > 1:
        dist.destroy_process_group()


@pytest.mark.parametrize("part", PARTS)
def test_passed_graphs_renew_their_state_by_aliases_and_give_what_ours_give(
    passes, ranks, part, checkpoint, tmp_path, monkeypatch
) -> None:
    """In float64: what float32 rounds differently is up to 4e-6."""
    monkeypatch.setattr(graph_module, "lookup_backend", lambda _: passes)
    monkeypatch.setattr(graph_module, "DEVICE_TYPES", (*DEVICE_TYPES, torch.float64))
    plan = replace(TINY_PLAN, tp=Degrees.same(ranks), dtype="float64")
    spec = part_spec(read_config(checkpoint), plan, part)
    write_part_shards(spec, Checkpoint(checkpoint), tmp_path)
    share, groups = PartShare(spec, group_of(ranks)), set[str]()
    share.load(read_part_shard(tmp_path, 0, share.weights))
    for seed, graph in enumerate(spec.graphs):
        example, names = graph.example(seed), [tensor.name for tensor in graph.inputs]
        with torch.no_grad():
            expected = graph.module(share.owner)(*example)
        before = example[len(names) :]
        state = [to_device_type(tensor).clone() for tensor in before]
        named = dict(zip(names, map(to_device_type, example), strict=False))
        compiled = CompiledGraph(graph, share.owner, Weights(share.owner, CPU), CPU)
        results = [*compiled(named, state), *state]
        for theirs, ours in zip(results, map(to_device_type, expected), strict=True):
            assert theirs.dtype == ours.dtype
            torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=0, msg=graph.label)
        passed, after = passes.passed[-1], expected[len(graph.outputs) :]
        renewed = [n for n, tensor in enumerate(before) if after[n] is not tensor]
        places = [passed.called[0][place].data_ptr() for _, place in passed.aliases]
        assert places == [state[number].data_ptr() for number in renewed], graph.label
        assert [output for output, _ in passed.aliases] == list(range(len(renewed)))
        assert passed.analysed == passed.aliases
        assert "copy_.default" not in passed.module.code
        groups |= passed.groups
    assert groups == ({"[[0, 1]]"} if ranks == 2 else set())
