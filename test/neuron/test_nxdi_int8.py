"""The thinker's experts in int8 by NxD's quantised layers, in NxDI's CPU mode."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.cpu.eager import media_encoders
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import decoder_spec
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import decoder_shard_bytes
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import NxdToolchain
from qwen3_omni_neuron.neuron.nxdi.slots import NxdiThinkerSlots
from qwen3_omni_neuron.neuron.part import rank_file
from testing.int8_experts import write_int8_experts
from testing.media_cases import CASES
from testing.models import load_host_models
from testing.neuron.alike import assert_prefills_alike, assert_speaks_alike, assert_steps_alike
from testing.neuron.cpu_mode import build_cpu_mode_engines, decoder_in_cpu_mode
from testing.neuron.eager_decoder_device import eager_device
from testing.neuron.nxdi_engines import nxdi_spec
from testing.prompts import prompt_of
from testing.specs import cpu_engines, engine_spec

EXPERTS = {f"{name}_proj.{kind}" for name in ("gate_up", "down") for kind in ("weight", "scale")}


@pytest.mark.parametrize("name", ["image-and-audio", "two-clips"])
def test_prefills_steps_and_speech_are_those_of_the_weights(
    nxdi, checkpoint, prompt_builder, tmp_path, name
) -> None:
    """With activations in float32, against the CPU's engines over the weights in float32."""
    experts, widened = write_int8_experts(checkpoint, tmp_path)
    int8 = nxdi_spec(experts, dtype="int8")
    int8 = replace(int8, plan=replace(int8.plan, mixed_arithmetic="float32"))
    ours, theirs = cpu_engines(nxdi_spec(widened)), build_cpu_mode_engines(int8)
    prompt = prompt_builder.prompt(CASES[name].messages, CASES[name].use_audio_in_video)
    tokens = [assert_prefills_alike(ours.thinker, theirs.thinker, slot, prompt) for slot in (0, 2)]
    assert_steps_alike(ours.thinker, theirs.thinker, [2, 0], tokens, steps=3)
    assert_steps_alike(ours.thinker, theirs.thinker, [2], tokens[:1], steps=2)
    assert_speaks_alike(ours, theirs, 1, prompt, frames=2)


def test_nxdis_own_compile_and_load_hold_the_int8_experts(
    nxdi, checkpoint, config, tmp_path, monkeypatch
) -> None:
    """Over the stand-in of the compiler, from the files that a compile writes."""
    monkeypatch.setenv("NXD_CPU_MODE", "0")
    experts, widened = write_int8_experts(checkpoint, tmp_path / "checkpoints")
    sizes: dict[str, Any] = {"max_concurrency": 2, "context_length": 48}
    spec = nxdi_spec(experts, dtype="int8", prompt_buckets=(48,), decode_buckets=(48,), **sizes)
    plan = replace(spec.plan, mixed_arithmetic="float32")
    thinker, folder = decoder_spec(config, plan, "thinker"), tmp_path / "thinker"
    folder.mkdir()
    with eager_device():
        NxdToolchain().compile_decoder(thinker, Checkpoint(experts), folder)
    files = load_file(folder / rank_file(0))
    assert decoder_shard_bytes(thinker) == sum(tensor.nbytes for tensor in files.values())
    assert {n.split("mlp_op.")[1] for n, t in files.items() if "mlp_op." in n} == EXPERTS
    graphs = NxdToolchain().load_decoder(thinker, folder)
    whole = engine_spec(widened, **sizes)
    media = media_encoders(load_host_models(Checkpoint(widened), config, torch.float32), whole)
    theirs = ThinkerEngine(config, NxdiThinkerSlots(graphs, config), media)
    ours = cpu_engines(whole).thinker
    tokens = [
        assert_prefills_alike(ours, theirs, slot, prompt_of(torch.arange(1, rows)))
        for slot, rows in enumerate((20, 40))
    ]
    assert_steps_alike(ours, theirs, [1, 0], tokens[::-1], steps=3)
    graphs.close()


def test_the_experts_alone_are_quantised_and_scales_are_float32(nxdi, checkpoint, config) -> None:
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
