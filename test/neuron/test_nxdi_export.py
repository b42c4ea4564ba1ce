"""Every graph of the decoders over NxDI, before any compiler sees it: sizes, operations, shapes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DECODERS, DecoderSpec
from testing.export import open_shapes, rejected_ops
from testing.hlo import lint_hlo
from testing.neuron.nxdi_sources import join_ranks
from testing.specs import decoder_plan

# Two prompts; one slot, several of them, all.
PLAN = decoder_plan(1, 3, 96, dtype="bfloat16", prompt_buckets=(24, 96), batches=(1, 2, 3))
GRAPHS = 5
INT8 = "thinker in int8"
Graphs = Iterator[tuple[str, torch.nn.Module, tuple[torch.Tensor, ...]]]


@pytest.fixture
def graphs_of(nxdi, checkpoint, config) -> Callable[[str], Graphs]:
    """Label, module and example of every graph, as NxDI's builder gets them."""
    from testing.neuron.cpu_mode_decoder import CpuModeDecoder

    join_ranks(1)

    def graphs(part: str) -> Graphs:
        plan = replace(PLAN, dtype="int8" if part == INT8 else "bfloat16")
        spec = DecoderSpec(part.partition(" ")[0], config, plan)
        decoder = CpuModeDecoder(spec, Checkpoint(checkpoint))
        for wrapper in decoder.models:
            instance = wrapper.get_model_instance()
            instance.load_module()
            for index, example in enumerate(wrapper.input_generator()):
                module, _ = instance.get(index)
                yield f"{wrapper.tag}[{wrapper.neuron_config.buckets[index]}]", module, example

    return graphs


@pytest.mark.parametrize("part", [*DECODERS, INT8])
def test_every_graph_has_fixed_sizes_and_no_operation_that_is_rejected(
    graphs_of, part, monkeypatch
) -> None:
    """NxD computes its routing in float64 on purpose, as for every mixture of experts that it has;
    nothing else does."""
    # NxDI takes subclasses of tensors off before its kernels, and so those of torch.export too.
    monkeypatch.setattr(torch.Tensor, "as_subclass", lambda tensor, _kind: tensor)
    labels = set()
    for label, module, example in graphs_of(part):
        with torch.no_grad():
            program = torch.export.export(module, example, strict=False)
        assert open_shapes(program) == [], label
        nodes = {node.name: node for node in program.graph.nodes}
        for found in rejected_ops(program):
            name, what = found.split(": ")
            assert what == "torch.float64", f"{label}: {found}"
            assert "modules/moe/" in nodes[name].meta["stack_trace"], f"{label}: {found}"
        labels.add(label)
    assert len(labels) == GRAPHS


@pytest.mark.parametrize("part", DECODERS)
def test_no_two_graphs_take_inputs_of_the_same_shapes(graphs_of, part) -> None:
    """The runtime tells graphs apart by them."""
    shapes = [[list(tensor.shape) for tensor in example] for _, _, example in graphs_of(part)]
    assert len({str(shape) for shape in shapes}) == len(shapes) == GRAPHS


@pytest.mark.parametrize("part", [*DECODERS, INT8])
def test_all_graphs_share_weights_and_state(graphs_of, part) -> None:
    """The runtime takes names and shapes from the first."""
    first, *others = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()}
        for _, module, _ in graphs_of(part)
    ]
    assert any(name.startswith("kv_mgr.") for name in first)
    assert all(other == first for other in others)


@pytest.mark.parametrize("part", [*DECODERS, INT8])
def test_the_hlo_of_every_graph_holds_nothing_that_the_compiler_refuses(graphs_of, part) -> None:
    """Lowered by torch_xla, which is no dependency: testing/hlo_table.py says how to install it."""
    if "torch_xla" not in metadata.packages_distributions():  # closed_wheels stands in for it
        pytest.skip("torch_xla is not installed: nothing was lowered")
    for label, module, example in graphs_of(part):
        found = lint_hlo(hlo_of(module, example))
        assert not {what for what in found.rejected if what != "f64"}, label
        assert sum(found.ops.values()) > 100


def hlo_of(module: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> str:
    import torch_xla
    from torch_xla.debug import metrics

    metrics.clear_counters()
    device: Any = torch_xla.device()
    with torch.no_grad():
        out = module.to(device)(*(tensor.to(device) for tensor in example))
    missing = [name for name in metrics.counter_names() if name.startswith("aten::")]
    assert not missing, f"no HLO of {missing}"
    return str(torch_xla._XLAC._get_xla_tensors_hlo(list(out)))
