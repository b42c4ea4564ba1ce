"""Parts compiled for Neuron, with the compiler simulated: weights, calls, state, types, errors."""

import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.checkpoint.parameters import converted
from qwen3_omni_neuron.errors import ClosedError
from qwen3_omni_neuron.neuron.graphs.all import static_models
from qwen3_omni_neuron.neuron.graphs.layers import Alone
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import TracedPart
from qwen3_omni_neuron.neuron.part import LoadedPart, PartSpec, rank_file
from qwen3_omni_neuron.neuron.shards import part_shard_bytes, weight_name, write_part_shards
from testing.graph_cases import with_weights
from testing.models import load_models
from testing.parallel import unshard
from testing.part_cases import PLAIN_PARTS, PlainPart, calls_of, plain_graphs, plain_spec
from testing.repeats import again
from testing.simulated_toolchain import SimulatedCores, SimulatedToolchain

CLOSE = {"atol": 1e-9, "rtol": 1e-9}  # float64: sums in another order
# 2 ranks have heads of their own, 8 are more than the heads.
TP = (again(1), 2, again(4), 8)
TOOLCHAIN = SimulatedToolchain()


@pytest.fixture(scope="module")
def double(checkpoint, config) -> Models:
    weights = load_models(Checkpoint(checkpoint), config, torch.float64)
    return with_weights(static_models(config, torch.float64), weights)


@pytest.fixture
def vocoder(checkpoint, config, tmp_path) -> LoadedPart:
    return loaded(plain_spec(config, "code2wav", 2), checkpoint, tmp_path)


def loaded(spec: PartSpec, checkpoint: Path, folder: Path) -> LoadedPart:
    TOOLCHAIN.compile_part(spec, Checkpoint(checkpoint), folder)
    return TOOLCHAIN.load_part(spec, folder)


def bytes_of_data(path: Path) -> int:
    """Size of a safetensors file without its header, whose length is in its first 8 bytes."""
    stored = path.read_bytes()
    return len(stored) - 8 - int.from_bytes(stored[:8], "little")


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("part", PLAIN_PARTS)
def test_every_graph_of_a_loaded_part_is_the_graph(
    checkpoint, config, double, tmp_path, part, tp
) -> None:
    """With the state that the calls before it left, where there is one."""
    given = loaded(plain_spec(config, part, tp), checkpoint, tmp_path)
    whole = {graph.label: graph for graph in plain_graphs(config, part, 1, torch.float64)}
    plain = PlainPart(whole, getattr(double, part))
    assert given.graphs.keys() == whole.keys()
    for number, (label, inputs) in enumerate(calls_of(whole)):
        expected = plain.call(label, *inputs)
        said = f"call {number}, {label}"
        torch.testing.assert_close(
            given.call(label, *inputs), expected, **CLOSE, msg=lambda m, s=said: f"{s}: {m}"
        )


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("part", PLAIN_PARTS)
def test_the_files_of_all_ranks_are_the_weights(checkpoint, config, tmp_path, part, tp) -> None:
    """Put together again, to the bit; and each is what the traced module takes."""
    spec = plain_spec(config, part, tp, torch.bfloat16)
    write_part_shards(spec, Checkpoint(checkpoint), tmp_path)
    files = [load_file(tmp_path / rank_file(rank)) for rank in range(tp)]
    traced = TracedPart(spec, Alone())
    whole = dict(converted(spec.weights, Checkpoint(checkpoint), torch.bfloat16))
    assert whole.keys() == dict(spec.make().named_parameters()).keys()
    for name, tensor in (whole | traced.constants).items():
        shards = [file.pop(weight_name(name)) for file in files]
        together = unshard(shards, traced.cuts.get(name))
        torch.testing.assert_close(together, tensor, atol=0, rtol=0, msg=name)
    assert not any(files), "names that no module takes"
    written = sum(bytes_of_data(tmp_path / rank_file(rank)) for rank in range(tp))
    assert written == part_shard_bytes(spec)


def test_graphs_of_a_part_have_one_forward_and_named_parameters(config) -> None:
    for part in PLAIN_PARTS:
        spec = plain_spec(config, part, 1)
        modules = list(TracedPart(spec, Alone()).graphs.values())
        signatures = {str(inspect.signature(module.forward)) for module in modules}
        assert len(signatures) == 1
        parameters = inspect.signature(modules[0].forward).parameters.values()
        assert {p.default for p in parameters} == {None}
        assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        names = {tensor.name for graph in spec.graphs for tensor in graph.inputs}
        assert {p.name for p in parameters} == names
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            modules[0](colour=torch.zeros(1))


def test_on_the_device_an_int64_is_an_int32(checkpoint, config, tmp_path) -> None:
    """Inputs, outputs, state and constants; and it comes back to the host as it was."""
    for name in ("code_predictor", "code2wav"):
        spec, folder = plain_spec(config, name, 2), tmp_path / name
        folder.mkdir()
        TOOLCHAIN.compile_part(spec, Checkpoint(checkpoint), folder)
        cores = SimulatedCores(spec, folder)
        seen: list[Tensor] = []

        def run(label: str, inputs: dict[str, Tensor], cores=cores, seen=seen) -> list[Tensor]:
            outputs = cores.run(label, inputs)
            seen += [*inputs.values(), *outputs]
            return outputs

        part = LoadedPart(spec.graphs, run)
        for label, inputs in calls_of(part.graphs):
            outputs = part.call(label, *inputs)
            said = [graph_output.dtype for graph_output in part.graphs[label].outputs]
            assert [output.dtype for output in outputs] == said
        seen += [line for states in cores.states for line in states.values()]
        seen += TracedPart(spec, Alone()).constants.values()
        kinds = {tensor.dtype for tensor in seen}
        assert torch.int32 in kinds
        assert torch.int64 not in kinds


def test_a_call_of_other_inputs_than_were_compiled_fails(vocoder) -> None:
    label = "code2wav[streams=3,frames=4]"
    codes, slots, position = vocoder.graphs[label].example(0)[:3]
    with pytest.raises(AssertionError, match=r"frames=4\] was called with codes \(\(3, 16, 3\),"):
        vocoder.call(label, codes[..., :3], slots, position)
    with pytest.raises(AssertionError, match=r"called with slots \(\(3,\), torch.int32\)"):
        vocoder.call(label, codes, slots.int(), position)
    with pytest.raises(AssertionError, match=r"called without slots"):
        vocoder.call(label, codes, None, position)
    vocoder.close()
    with pytest.raises(ClosedError, match="code2wav was closed"):
        vocoder.call(label, codes, slots, position)
