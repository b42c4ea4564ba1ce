"""Target torchneuron with the thinker's experts in int8 replies as their weights do."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.compilation.loading import load_engines
from qwen3_omni_neuron.compilation.manifest import read_manifest
from qwen3_omni_neuron.compilation.plan import MODELS
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.model.moe import SCALE
from qwen3_omni_neuron.neuron.part import rank_file
from qwen3_omni_neuron.neuron.torchneuron.build import build_engines
from qwen3_omni_neuron.options import LoadOptions
from qwen3_omni_neuron.verification.oracle import Reference
from testing.int8_experts import write_int8_experts
from testing.media_cases import CASES, text, user
from testing.repeats import again
from testing.replies import GREEDY, assert_same, reply_to_the_limit
from testing.specs import cpu_engines, engine_spec
from testing.torchneuron.leaner import write_leaner_checkpoint
from testing.torchneuron.runtime import (
    StandIn,
    compile_for_stand_in,
    omni_over,
    stand_in_target,
    weights_for_stand_in,
)

TEXT = [user(text("What colour is the sky?"))]
CLIPS = CASES["two-clips"].messages
LIMITS: dict[str, Any] = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 12}
# Activations in float32: in bfloat16 a product of int8 numbers is rounded elsewhere than one of
# bfloat16 weights, and test_torchneuron_speaking.py judges its replies.
exact = partial(stand_in_target, mixed_arithmetic="float32")


@pytest.fixture(scope="module")
def leaner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_leaner_checkpoint(tmp_path_factory.mktemp("leaner"))


@pytest.fixture(scope="module")
def experts(leaner: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint with experts that int8 keeps as they are, and the same in float32."""
    return write_int8_experts(leaner, tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def spec(experts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    tree = tmp_path_factory.mktemp("int8") / "tree"
    return compile_for_stand_in(experts[0], tree, exact(), dtype="int8")


@pytest.fixture(scope="module")
def widened(experts: tuple[Path, Path]) -> Path:
    return experts[1]


@pytest.fixture(scope="module")
def reference(widened: Path) -> Reference:
    return Reference(widened)


@pytest.fixture(scope="module", params=[False, again(True)])
def ours(
    request: pytest.FixtureRequest,
    experts: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Qwen3Omni]:
    """Captured or not: test_torchneuron_graphs.py captures them, too."""
    if request.param:
        spec = request.getfixturevalue("spec")
    else:
        folder = tmp_path_factory.mktemp("int8 weights")
        spec = weights_for_stand_in(experts[0], folder, exact(), dtype="int8")
    engines = build_engines(spec, runtime=StandIn(captures=request.param))
    with omni_over(Engines.of(engines), spec) as omni:
        yield omni


@pytest.mark.repeats  # of test_int8_experts.py: the files; of test_torchneuron_engines.py: the tree
def test_a_tree_holds_the_experts_in_int8_and_says_so(spec: EngineSpec) -> None:
    assert spec.compiled is not None
    manifest = read_manifest(spec.compiled)
    assert tuple(manifest.models) == MODELS and manifest.plan["dtype"] == "int8"
    found = {
        model: {
            name.rpartition(".")[2]
            for name, tensor in load_file(spec.compiled / model / part / rank_file(0)).items()
            if tensor.dtype == torch.int8 or name.endswith(("gate_up" + SCALE, "down" + SCALE))
        }
        for model, part in (("thinker", "thinker"), ("talker", "talker"))
    }
    assert found["thinker"] == {"gate_up", "down", "gate_up" + SCALE, "down" + SCALE}
    assert not found["talker"]


@pytest.mark.parametrize("messages", [again(TEXT), CLIPS], ids=["text", "two-clips"])
def test_a_reply_is_that_of_the_weights(
    ours: Qwen3Omni, widened: Path, reference: Reference, messages: Any
) -> None:
    """Token for token and code for code: transformers', and that of the CPU's engines in torch."""
    mine, theirs = reply_to_the_limit(ours, reference, messages, tokens=6, talker_max_new_tokens=12)
    assert_same(mine, theirs, reference)
    cpu = engine_spec(widened, dtype="float64", context_length=128)
    with omni_over(cpu_engines(cpu), cpu) as omni:
        for options in (GREEDY, {"seed": 3}):
            mine = ours.generate_audio(messages, **LIMITS, **options)
            other = omni.generate_audio(messages, **LIMITS, **options)
            assert mine.token_ids == other.token_ids
            assert mine.codes.tolist() == other.codes.tolist()


def test_replies_of_four_ranks_over_weights_that_int8_keeps_are_those_of_them(
    leaner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a quarter of every expert's width, and the scales of these outputs."""
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.setenv(name, "")  # what a load sets here is gone after this test
        monkeypatch.delenv(name)
    published, weights = write_int8_experts(leaner, tmp_path)
    target = exact(StandIn(captures=False))
    spec = weights_for_stand_in(published, tmp_path / "tree", target, dtype="int8", tp=4)
    engines = load_engines(target, spec, LoadOptions(instance="trn2.48xlarge"))
    reference = Reference(weights)
    with omni_over(engines, spec) as omni:
        mine, theirs = reply_to_the_limit(omni, reference, TEXT, tokens=6, talker_max_new_tokens=12)
    assert_same(mine, theirs, reference)
