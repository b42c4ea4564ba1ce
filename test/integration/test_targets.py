"""A target that the package does not know: what a new one takes, and that it speaks."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from qwen3_omni_neuron import Qwen3Omni, cli
from qwen3_omni_neuron.compilation.loading import TARGETS
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.cpu import build
from qwen3_omni_neuron.cpu.target import CPU
from qwen3_omni_neuron.engines.protocols import StageEngines
from qwen3_omni_neuron.errors import ArtifactError
from testing.specs import compiled_here

QUESTION = [{"role": "user", "content": "What colour is the sky?"}]
LIMITS = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 8, "seed": 3}


# The toy target: the CPU's engines, in float32 alone, over slots and buckets of its own.
def build_toy_engines(spec: EngineSpec, stages: Sequence[str]) -> StageEngines:
    assert spec.plan.target == "toy"
    return build.build_engines(spec, stages)


TOY = replace(
    CPU,
    limits=replace(CPU.limits, target="toy", dtypes=("float32",), sizes={"chunk_frames": (1, 4)}),
    versions=lambda: {"toy-compiler": "1.0"},
    build_engines=build_toy_engines,
)


@pytest.fixture(autouse=True)
def with_toy(monkeypatch) -> None:
    monkeypatch.setitem(TARGETS, "toy", TOY)


@pytest.mark.parametrize("placement", ["shared", "split"])
def test_a_toy_target_speaks(checkpoint, omni, placement) -> None:
    expected = omni.generate_audio(QUESTION, **LIMITS)
    with Qwen3Omni.load(checkpoint, target="toy", dtype="float32", placement=placement) as toy:
        result = toy.generate_audio(QUESTION, **LIMITS)
    assert result.token_ids == expected.token_ids
    assert result.codes.tolist() == expected.codes.tolist()
    assert len(result.codes) == 7


def test_a_toy_target_is_compiled_and_loaded_by_its_versions(
    checkpoint, omni, tmp_path, monkeypatch
) -> None:
    words = ["--model", str(checkpoint), "--out", str(tmp_path), "--target", "toy"]
    with compiled_here():
        assert cli.main(["compile", *words, "--dtype", "float32"]) == 0
    with Qwen3Omni.load(checkpoint, compiled_path=tmp_path) as toy:
        result = toy.generate_audio(QUESTION, **LIMITS)
    assert result.codes.tolist() == omni.generate_audio(QUESTION, **LIMITS).codes.tolist()
    monkeypatch.setitem(TARGETS, "toy", replace(TOY, versions=lambda: {"toy-compiler": "2.0"}))
    with pytest.raises(
        ArtifactError, match=r"compiled with toy-compiler 1.0, but this machine has 2.0"
    ):
        Qwen3Omni.load(checkpoint, compiled_path=tmp_path)
