"""A clean checkpoint holds against transformers' results in NxDI's CPU mode, and its layers."""

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config, read_generation_defaults
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.verification.reference import read_reference
from qwen3_omni_neuron.verification.verify import compare
from qwen3_omni_neuron.verification.write import write_reference
from testing.media_cases import write_deeper_checkpoint
from testing.neuron.cpu_mode import build_cpu_mode_engines
from testing.neuron.nxdi_engines import nxdi_spec
from testing.verified import STAGES, short_questions


def test_a_clean_checkpoint_holds(nxdi, tmp_path) -> None:
    folder, path = tmp_path / "checkpoint", tmp_path / "reference.npz"
    write_deeper_checkpoint(folder)
    write_reference(folder, path, short_questions(), tokens=4, frames=5)
    config = read_config(folder)
    reference = read_reference(path, folder)
    spec = nxdi_spec(folder, max_concurrency=1)
    engines, prompt_builder = build_cpu_mode_engines(spec), PromptBuilder(folder, config)
    defaults = read_generation_defaults(folder)
    with Qwen3Omni(config, defaults, prompt_builder, engines, max_queued=8) as omni:
        found = compare(omni, engines, spec.plan, reference)
    assert [one for one in found if not one.holds] == []
    assert len(found) == STAGES, "every stage had rows"
