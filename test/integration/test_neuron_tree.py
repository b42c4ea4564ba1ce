"""A tree for Neuron, compiled by the real runner and loaded again, with the compiler simulated.

The weights are cut and read as for a device, two ranks are threads; see simulated_toolchain.
"""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from qwen3_omni_neuron import Qwen3Omni, cli
from qwen3_omni_neuron.checkpoint.config_json import read_generation_defaults
from qwen3_omni_neuron.compilation.loading import TARGETS
from qwen3_omni_neuron.compilation.manifest import MANIFEST_FILE, read_manifest, verify_files
from qwen3_omni_neuron.compilation.plan import MODEL_PARTS, MODELS, CompilePlan
from qwen3_omni_neuron.compilation.runner import compile_tree
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.compilation.tree import open_tree
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.errors import ArtifactError, CompileError, NotInstalledError, OptionError
from qwen3_omni_neuron.neuron.graphs.all import all_graphs
from qwen3_omni_neuron.neuron.nxdi.build import build_engines
from qwen3_omni_neuron.neuron.nxdi.compile import compile_model, expected_bytes
from qwen3_omni_neuron.neuron.nxdi.target import NEURON
from testing.eager_neuron import SETTINGS
from testing.media_cases import CASES
from testing.replies import assert_alike
from testing.simulated_toolchain import SimulatedToolchain
from testing.specs import compiled_here, cpu_engines, plan_of

TOOLCHAIN = SimulatedToolchain()
SIMULATED = replace(NEURON, compile_model=partial(compile_model, toolchain=TOOLCHAIN))
LIMITS = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 12}
HEADER_BYTES = 200_000  # of the files of a model, and a description of its graphs
WITHOUT_SDK = importlib.util.find_spec("neuronx_distributed") is None


class FailingToolchain(SimulatedToolchain):
    """Its compiler gives up at the vision encoder."""

    def compile_part(self, spec, checkpoint, folder):  # type: ignore[no-untyped-def]
        if spec.name == "vision_encoder":
            (folder / "log-neuron-cc.txt").write_text("internal error")
            raise CompileError("vision_encoder was not compiled: internal error")
        super().compile_part(spec, checkpoint, folder)


@pytest.fixture(scope="module")
def plan(checkpoint, config) -> CompilePlan:
    settings = SETTINGS | {"tp": 2, "dtype": "float32"}
    return plan_of(checkpoint, config, "neuron", **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tree(plan, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("neuron") / "tree"
    with compiled_here():
        outcome = compile_tree(plan, folder, SIMULATED)
    assert outcome.compiled == MODELS
    assert not outcome.missing
    return folder


@pytest.fixture(scope="module")
def spec(tree, checkpoint, config, prompt_builder) -> EngineSpec:
    plan = open_tree(tree, checkpoint, config, TARGETS, {})
    return EngineSpec(plan, config, prompt_builder.newline_id, tree)


@pytest.fixture(scope="module")
def both(spec, checkpoint, prompt_builder) -> Iterator[tuple[Qwen3Omni, Qwen3Omni]]:
    """On the CPU, and from the tree."""
    defaults = read_generation_defaults(checkpoint)
    theirs = Engines.of(build_engines(spec, toolchain=TOOLCHAIN))
    ours = cpu_engines(replace(spec, compiled=None))
    with (
        Qwen3Omni(spec.config, defaults, prompt_builder, ours, 8) as on_cpu,
        Qwen3Omni(spec.config, defaults, prompt_builder, theirs, 8) as on_neuron,
    ):
        yield on_cpu, on_neuron


@pytest.mark.parametrize("name", ["image-and-audio", "two-clips"])
def test_a_reply_from_the_tree_is_the_cpus(both, name) -> None:
    ours, theirs = (o.generate_audio(CASES[name].messages, seed=3, **LIMITS) for o in both)
    assert_alike(theirs, ours, atol=1e-4)
    assert len(theirs.codes) > 5


@pytest.mark.parametrize("model", sorted(set(MODELS) - {"thinker", "talker"}))
def test_the_manifest_has_a_record_of_every_graph_of_a_model(spec, tree, model) -> None:
    """The unit tests of graphs hold these against the modules."""
    graphs = [g for g in all_graphs(spec.config, spec.plan) if g.part in MODEL_PARTS[model]]
    assert graphs
    for record, graph in zip(read_manifest(tree).models[model].graphs, graphs, strict=True):
        assert (record.name, record.bucket) == (graph.name, graph.bucket)
        for said, specs in (
            (record.inputs, graph.inputs),
            (record.outputs, graph.outputs),
            (record.state, graph.state),
        ):
            wanted = [(s.name, s.shape, f"torch.{said[s.name].dtype}") for s in specs]
            assert [
                (n, t.shape, str(s.dtype)) for (n, t), s in zip(said.items(), specs, strict=True)
            ] == wanted


def test_the_expected_bytes_are_those_of_the_weights(plan, tree) -> None:
    for model, record in read_manifest(tree).models.items():
        expected = expected_bytes(plan, model)
        assert expected <= record.bytes <= expected + HEADER_BYTES, model


def test_what_a_compiler_left_is_kept_until_the_next_run_which_compiles_that_alone(
    plan, tree, tmp_path
) -> None:
    copy = Path(shutil.copytree(tree, tmp_path / "tree"))
    (copy / "vision" / "vision_encoder" / "graphs.json").unlink()
    failing = replace(SIMULATED, compile_model=partial(compile_model, toolchain=FailingToolchain()))
    with pytest.raises(CompileError, match="vision_encoder was not compiled"):
        compile_tree(plan, copy, failing)
    kept = copy / ".vision.failed" / "vision_encoder" / "log-neuron-cc.txt"
    assert kept.read_text() == "internal error"
    with compiled_here():
        assert compile_tree(plan, copy, SIMULATED).compiled == ("vision",)
    assert not kept.exists()
    verify_files(copy, read_manifest(copy))


@pytest.mark.skipif(not WITHOUT_SDK, reason="the Neuron SDK, or its sources, are here")
def test_without_the_sdk_it_says_what_is_not_there(checkpoint, tree, tmp_path, capsys) -> None:
    said = "target neuron needs torch_neuronx, libneuronxla, neuronx_distributed"
    words = ["compile", "--model", str(checkpoint), "--out", str(tmp_path), "--target", "neuron"]
    assert cli.main([*words, "--dtype", "float32"]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / MANIFEST_FILE).exists()
    with pytest.raises(NotInstalledError, match=said):
        Qwen3Omni.load(checkpoint, compiled_path=tree, instance="trn2.48xlarge")


def test_what_does_not_fit_a_target_is_refused(checkpoint, tree) -> None:
    with pytest.raises(
        OptionError, match=r"give compiled_path. To compile: qwen3-omni-neuron comp"
    ):
        Qwen3Omni.load(checkpoint, target="neuron")
    with pytest.raises(OptionError, match=r"target is 'cpu', but .* compiled with 'neuron'"):
        Qwen3Omni.load(checkpoint, compiled_path=tree, target="cpu")
    with pytest.raises(
        OptionError, match=r"cores is only for the targets on Neuron, .* for target cpu"
    ):
        Qwen3Omni.load(checkpoint, cores={"thinker": "0-7"})
    with pytest.raises(OptionError, match=r"trn2.3xlarge"):
        Qwen3Omni.load(checkpoint, compiled_path=tree, placement="split", instance="trn2.3xlarge")


def test_another_sdk_is_refused(tree, checkpoint, config, tmp_path) -> None:
    copy = Path(shutil.copytree(tree, tmp_path / "tree"))
    raw = json.loads((copy / MANIFEST_FILE).read_text())
    raw["versions"]["neuronx-cc"] = "2.25.1"
    (copy / MANIFEST_FILE).write_text(json.dumps(raw))
    with pytest.raises(
        ArtifactError, match=r"compiled with neuronx-cc 2.25.1, but this machine has"
    ):
        open_tree(copy, checkpoint, config, TARGETS, {})
