"""A clean checkpoint holds against transformers' results on target torchneuron, and its layers."""

from pathlib import Path

import pytest

from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.neuron.torchneuron.build import build_engines
from qwen3_omni_neuron.verification.reference import read_reference
from qwen3_omni_neuron.verification.verify import compare
from qwen3_omni_neuron.verification.write import write_reference
from testing.torchneuron.leaner import write_leaner_checkpoint
from testing.torchneuron.runtime import StandIn, omni_over, weights_for_stand_in
from testing.verified import STAGES, short_questions


@pytest.mark.repeats  # of test_torchneuron_engines.py: its replies; of test_verify.py: the verb
def test_a_clean_checkpoint_holds(tmp_path: Path) -> None:
    folder, path = write_leaner_checkpoint(tmp_path / "checkpoint"), tmp_path / "reference.npz"
    write_reference(folder, path, short_questions(), tokens=4, frames=5)
    reference = read_reference(path, folder)

    def spec_of(model: Path) -> EngineSpec:
        tree = model.parent / f"{model.name}-tree"
        return weights_for_stand_in(model, tree, dtype="bfloat16", max_concurrency=1)

    def build(spec: EngineSpec) -> Engines:
        return Engines.of(build_engines(spec, runtime=StandIn(captures=False)))

    spec = spec_of(folder)
    engines = build(spec)
    with omni_over(engines, spec) as omni:
        found = compare(omni, engines, spec.plan, reference)
    assert [one.stage for one in found if not one.holds] == []
    assert len(found) == STAGES, "every stage had rows"
