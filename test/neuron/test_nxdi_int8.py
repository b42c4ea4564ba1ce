"""The thinker's experts in int8 by NxD's quantised layers, in NxDI's CPU mode."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import decoder_spec
from qwen3_omni_neuron.prompt.template import Conversation
from testing.int8_experts import write_int8_experts
from testing.media_cases import CASES
from testing.neuron.alike import assert_prefills_alike, assert_speaks_alike, assert_steps_alike
from testing.neuron.cpu_mode import build_cpu_mode_engines, decoder_in_cpu_mode
from testing.neuron.nxdi_engines import nxdi_spec
from testing.specs import cpu_engines

EXPERTS = {f"{name}_proj.{kind}" for name in ("gate_up", "down") for kind in ("weight", "scale")}


@pytest.mark.parametrize("name", ["image-and-audio", "two-clips"])
def test_prefills_steps_and_speech_are_those_of_the_weights(
    nxdi: None, checkpoint: Path, conversation: Conversation, tmp_path: Path, name: str
) -> None:
    """With activations in float32, against the CPU's engines over the weights in float32."""
    _, widened = write_int8_experts(checkpoint, tmp_path)
    int8 = nxdi_spec(checkpoint, dtype="int8")
    int8 = replace(int8, plan=replace(int8.plan, mixed_arithmetic="float32"))
    ours, theirs = cpu_engines(nxdi_spec(widened)), build_cpu_mode_engines(int8)
    prompt = conversation.prompt(CASES[name].messages, CASES[name].use_audio_in_video)
    tokens = [assert_prefills_alike(ours.thinker, theirs.thinker, slot, prompt) for slot in (0, 2)]
    assert_steps_alike(ours.thinker, theirs.thinker, [2, 0], tokens, steps=3)
    assert_steps_alike(ours.thinker, theirs.thinker, [2], tokens[:1], steps=2)
    assert_speaks_alike(ours, theirs, 1, prompt, frames=2)


def test_the_experts_alone_are_quantised_and_scales_are_float32(
    nxdi: None, checkpoint: Path, config: OmniConfig
) -> None:
    plan = nxdi_spec(checkpoint, dtype="int8").plan
    assert plan.arithmetic == "bfloat16"
    for part, expected in (("thinker", EXPERTS), ("talker", set())):
        decoder = decoder_in_cpu_mode(decoder_spec(config, plan, part), Checkpoint(checkpoint))
        state = decoder.context_encoding_model.model.state_dict()
        found = {
            ".".join(name.split(".")[-2:]): tensor.dtype
            for name, tensor in state.items()
            if tensor.dtype == torch.int8 or name.endswith(".scale")
        }
        assert found.keys() == expected
        assert all((kind == torch.int8) == name.endswith("weight") for name, kind in found.items())


def test_profile_fast_is_refused(nxdi: None, checkpoint: Path, config: OmniConfig) -> None:
    from qwen3_omni_neuron.neuron.nxdi.inference_config import inference_config

    plan = nxdi_spec(checkpoint, dtype="int8", profile="fast").plan
    with pytest.raises(OptionError, match='"fast" takes kernels that have no int8'):
        inference_config(decoder_spec(config, plan, "thinker"))
