"""Numbers of the code predictor: the default of each target and dtype, its codes, the switch."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import fill
from qwen3_omni_neuron.compilation.plan import SAME
from qwen3_omni_neuron.cpu.eager import EagerPredictor
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.weights import load_checkpoint_models
from qwen3_omni_neuron.engines.protocols import Engines, Predictor
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.neuron.engines import NeuronPredictor
from qwen3_omni_neuron.neuron.graphs.all import static_models
from qwen3_omni_neuron.neuron.graphs.parallel import parallelize
from qwen3_omni_neuron.neuron.part import LoadedPart, PartSpec
from qwen3_omni_neuron.neuron.shards import write_part_shards
from qwen3_omni_neuron.neuron.torchneuron import graph
from qwen3_omni_neuron.neuron.torchneuron.build import build_engines
from qwen3_omni_neuron.neuron.torchneuron.graph import PartGraphs
from testing.native_library import needs_c
from testing.outlier import (
    Codes,
    codes_of_engine,
    float32_codes,
    frame_inputs,
    predictor_spec,
    same_frames,
    talker_models,
)
from testing.parallel import shard_state
from testing.rank_threads import Ranks
from testing.released import RELEASED
from testing.simulated_toolchain import SimulatedToolchain
from testing.specs import plan_of
from testing.tiny import write_tiny_checkpoint
from testing.torchneuron.runtime import StandIn, omni_over, run_eagerly, weights_for_stand_in

MODEL = Path("/a/checkpoint")
BFLOAT16 = torch.bfloat16
SHORT: dict[str, Any] = {"talker_max_new_tokens": 12, "seed": 0}


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("outlier"), outlier=True)


@pytest.fixture(scope="module")
def reference(outlier: Path) -> Codes:
    return float32_codes(outlier)


def test_a_target_and_dtype_take_these_predictor_dtypes_and_no_others() -> None:
    for target, dtype, values, arithmetic in (
        ("cpu", "mixed", "same", "float32"),
        ("cpu", "float32", "same", "float32"),
        ("cpu", "float64", "same", "float64"),
        ("cpu", "int8", "mixed same", "float32"),
        ("cpu", "int4", "mixed same", "float32"),
        ("cpu", "bfloat16", "mixed same", "float32"),
        ("neuron", "bfloat16", "mixed same float32", "float32"),
        ("torchneuron", "bfloat16", "mixed same float32", "float32"),
        ("torchneuron", "float32", "same", "float32"),
    ):
        allowed = values.split()
        plan = plan_of(MODEL, RELEASED, target, dtype=dtype)
        assert (plan.predictor_dtype, plan.predictor_arithmetic) == (allowed[0], arithmetic)
        for value in allowed:
            made = plan_of(MODEL, RELEASED, target, dtype=dtype, predictor_dtype=value)
            assert made.predictor_dtype == value
            assert f"--predictor-dtype {value}" in made.command(Path("tree"))
        listed = " or ".join(", ".join(["auto", *allowed]).rsplit(", ", 1))
        said = f"{listed} for target {target} in dtype {dtype}, got 'int3'"
        with pytest.raises(OptionError, match=said):
            plan_of(MODEL, RELEASED, target, dtype=dtype, predictor_dtype="int3")


@pytest.mark.parametrize("packed", [True, False], ids=["for the C", "for torch"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_mixed_predictor_has_the_matrices_of_dtype_mixed(
    outlier: Path, dtype: str, packed: bool
) -> None:
    config, checkpoint = read_config(outlier), Checkpoint(outlier)

    def load(dtype: str, predictor_dtype: str = SAME) -> Any:
        given = checkpoint, config, dtype, ("talker",), packed
        return load_checkpoint_models(*given, predictor_dtype=predictor_dtype)

    ours, mixed, same = load(dtype, "mixed"), load("mixed"), load(dtype)
    for part, like, unlike in (("code_predictor", mixed, same), ("talker", same, mixed)):
        of = [dict(getattr(models, part).named_parameters()) for models in (ours, like, unlike)]
        assert all(torch.equal(tensor, of[1][name]) for name, tensor in of[0].items()), part
        assert any(
            tensor.dtype != of[2][name].dtype or not torch.equal(tensor, of[2][name])
            for name, tensor in of[0].items()
        ), part


def cpu_codes(outlier: Path, dtype: str, predictor_dtype: str, native: bool) -> Codes:
    """Return the codes of the CPU's code predictor, in C or in torch."""
    plan, config = plan_of(outlier, read_config(outlier), dtype=dtype), read_config(outlier)
    plan = replace(plan, predictor_dtype=predictor_dtype)
    given = Checkpoint(outlier), config, dtype, ("talker",), native
    predictor = load_checkpoint_models(*given, predictor_dtype=predictor_dtype).code_predictor
    assert predictor is not None and config.talker is not None
    engine: Predictor = EagerPredictor(predictor, getattr(torch, plan.predictor_arithmetic))
    if native:
        from qwen3_omni_neuron.cpu.native.predictor import NativePredictor

        library = find_library()
        assert library is not None
        engine = NativePredictor(config.talker, predictor, library)
    kind = getattr(torch, plan.arithmetic)
    return codes_of_engine(engine, frame_inputs(talker_models(outlier)), kind)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_c, id="C"), False])
@pytest.mark.parametrize(
    ("dtype", "predictor_dtype", "keeps"),
    [
        ("mixed", SAME, True),
        ("int8", "mixed", True),
        ("int4", "mixed", True),
        ("int8", SAME, False),
        ("bfloat16", "mixed", True),
        ("bfloat16", SAME, False),
    ],
)
def test_codes_on_the_cpu_are_the_references_where_the_dtype_keeps_them(
    outlier: Path, reference: Codes, dtype: str, predictor_dtype: str, keeps: bool, native: bool
) -> None:
    if native and dtype == "bfloat16":
        pytest.skip("torch computes bfloat16")
    found = same_frames(cpu_codes(outlier, dtype, predictor_dtype, native), reference)
    assert min(found) >= 0.98 if keeps else max(found) < 0.8, found


def neuron_part(target: str, spec: PartSpec, outlier: Path, folder: Path) -> LoadedPart:
    """Compile and load the code predictor with a target's own code, for one rank."""
    if target == "neuron":
        toolchain = SimulatedToolchain()
        toolchain.compile_part(spec, Checkpoint(outlier), folder)
        return toolchain.load_part(spec, folder)
    write_part_shards(spec, Checkpoint(outlier), folder)
    graphs = PartGraphs(spec, torch.device("cpu"), folder)
    return LoadedPart(spec.graphs, graphs.run)


@pytest.mark.parametrize(
    ("target", "predictor_dtype", "keeps"),
    [
        ("torchneuron", "mixed", True),
        ("neuron", "mixed", True),
        ("neuron", "float32", True),
        ("neuron", SAME, False),
    ],
)
def test_codes_of_the_graphs_for_neuron_are_the_references_unless_in_bfloat16(
    outlier: Path,
    reference: Codes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    predictor_dtype: str,
    keeps: bool,
) -> None:
    """The talker gives bfloat16 to each of them, and gets bfloat16 back."""
    # What is captured: test_torchneuron_graphs.py.
    monkeypatch.setattr(graph, "compile_module", run_eagerly)
    spec = predictor_spec(outlier, target, predictor_dtype)
    weights = torch.float32 if predictor_dtype == "float32" else BFLOAT16
    assert spec.dtype == weights
    engine = NeuronPredictor(neuron_part(target, spec, outlier, tmp_path), 64, None)
    codes = codes_of_engine(engine, frame_inputs(talker_models(outlier)), BFLOAT16)
    found = same_frames(codes, reference)
    assert min(found) >= 0.98 if keeps else max(found) < 0.5, found


def test_whole_replies_through_torchneuron_are_those_of_a_float32_predictor(
    outlier: Path, tmp_path: Path
) -> None:
    """Each frame goes back to the talker, in bfloat16: one other code would change all that follow.

    What is captured: test_torchneuron_graphs.py.
    """
    found = {}
    for value in ("float32", "mixed", SAME):
        spec = weights_for_stand_in(
            outlier, tmp_path / value, dtype="bfloat16", max_concurrency=1, batches=(1,),
            predictor_dtype=value,
        )  # fmt: skip
        engines = Engines.of(build_engines(spec, runtime=StandIn(captures=False)))
        with omni_over(engines, spec) as omni:
            found[value] = [
                omni.say("Yes.", **SHORT, **sampling).codes.tolist()
                for sampling in ({}, {"talker_do_sample": False, "predictor_do_sample": False})
            ]
    assert all(len(codes) > 5 for codes in found["float32"])
    assert found["mixed"] == found["float32"]
    assert all(a[0] != b[0] for a, b in zip(found[SAME], found["float32"], strict=True))


@torch.inference_mode()
def test_codes_over_two_ranks_are_those_of_one(outlier: Path, reference: Codes) -> None:
    """Ranks give each other float32, too."""
    config, ranks = read_config(outlier), Ranks(2)
    plain = talker_models(outlier, BFLOAT16).code_predictor
    assert plain is not None
    hidden, code0, *random = frame_inputs(talker_models(outlier))
    calls = []
    for rank in range(2):
        module = static_models(config).code_predictor
        assert module is not None
        cuts = parallelize(module, 2, ranks.rank(rank))
        fill(module, shard_state(plain.named_parameters(), cuts, rank).items())
        fill(module, plain.named_buffers())
        calls.append(partial(module, hidden, code0, *random))
    for sampled, feedback in ranks.run(calls):
        assert feedback.dtype == BFLOAT16
        assert (sampled == reference[1]).all(1).float().mean() >= 0.98


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_a_load_predicts_in_mixed_unless_it_asks_for_same(outlier: Path, dtype: str) -> None:
    def codes(**options: str) -> list[list[int]]:
        with Qwen3Omni.load(outlier, dtype=dtype, max_concurrency=1, **options) as omni:
            return omni.say("Yes.", **SHORT).codes.tolist()

    found = codes()
    assert found == codes(predictor_dtype="mixed")
    assert found != codes(predictor_dtype=SAME)


def test_a_tree_of_an_earlier_version_is_what_it_was(checkpoint: Path, tmp_path: Path) -> None:
    from qwen3_omni_neuron import cli
    from testing.specs import compiled_here

    tree = tmp_path / "tree"
    words = ["compile", "--model", str(checkpoint), "--out", str(tree), "--dtype", "bfloat16"]
    with compiled_here():
        assert cli.main([*words, "--predictor-dtype", "same", "--max-concurrency", "1"]) == 0
    manifest = json.loads((tree / "manifest.json").read_text())
    assert manifest["plan"].pop("predictor_dtype") == "same"
    (tree / "manifest.json").write_text(json.dumps(manifest))
    with Qwen3Omni.load(checkpoint, compiled_path=tree) as omni:
        ours = omni.say("Yes.", **SHORT).codes.tolist()
    loading: dict[str, Any] = {"dtype": "bfloat16", "predictor_dtype": "same"}
    with Qwen3Omni.load(checkpoint, max_concurrency=1, **loading) as omni:
        assert omni.say("Yes.", **SHORT).codes.tolist() == ours
    said = "predictor_dtype is 'mixed', but .* was compiled with 'same'"
    with pytest.raises(OptionError, match=said):
        Qwen3Omni.load(checkpoint, compiled_path=tree, predictor_dtype="mixed")
