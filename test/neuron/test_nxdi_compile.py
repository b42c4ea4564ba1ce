"""NxDI's own compile, save and load, over a stand-in of the compiler and the device.

See eager_decoder_device for what it stands in for. One core: a stand-in adds nothing up over
several.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.cpu.eager import media_encoders, talker_engine
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.errors import CompileError
from qwen3_omni_neuron.neuron.nxdi.build import warm_up_decoder
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DECODERS, DecoderSpec
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import NxdToolchain
from qwen3_omni_neuron.neuron.nxdi.slots import NxdiSlots, NxdiThinkerSlots
from testing.media_cases import CASES
from testing.models import load_host_models
from testing.neuron.alike import assert_prefills_alike, assert_speaks_alike, assert_steps_alike
from testing.neuron.eager_decoder_device import eager_device
from testing.prompts import prompt_of
from testing.specs import cpu_engines, decoder_plan, engine_spec

PLAN = decoder_plan(1, 3, 144, prompt_buckets=(48, 144), batches=(1, 2, 3))
GRAPHS = 5


@pytest.fixture(scope="module", autouse=True)
def as_on_a_device(nxdi) -> Iterator[None]:
    """NxD's CPU mode, which `nxdi` chooses, neither compiles nor loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NXD_CPU_MODE", "0")
        yield


@dataclass(frozen=True)
class Compiled:
    folders: dict[str, Path]
    flags: list[str]  # of the thinker


@pytest.fixture(scope="module")
def compiled(nxdi, checkpoint, config, tmp_path_factory) -> Compiled:
    folders, flags = {}, {}
    for part in DECODERS:
        spec, folders[part] = DecoderSpec(part, config, PLAN), tmp_path_factory.mktemp(part)
        with eager_device() as flags[part]:
            NxdToolchain().compile_decoder(spec, Checkpoint(checkpoint), folders[part])
    return Compiled(folders, flags["thinker"])


@pytest.fixture(scope="module")
def thinker(compiled, config) -> Iterator[Any]:
    yield from loaded(DecoderSpec("thinker", config, PLAN), compiled)


@pytest.fixture(scope="module")
def talker(compiled, config) -> Iterator[Any]:
    yield from loaded(DecoderSpec("talker", config, PLAN), compiled)


def loaded(spec: DecoderSpec, compiled: Compiled) -> Iterator[Any]:
    graphs = NxdToolchain().load_decoder(spec, compiled.folders[spec.part])
    yield graphs
    graphs.close()


@pytest.fixture(scope="module")
def engines(thinker, talker, checkpoint, config, prompt_builder) -> tuple[Engines, Engines]:
    """The CPU's, and those over the compiled decoders."""
    spec = engine_spec(checkpoint, max_concurrency=3, context_length=144)
    host = load_host_models(Checkpoint(checkpoint), config, torch.float32)
    media = media_encoders(host, spec)
    theirs = Engines(
        ThinkerEngine(config, NxdiThinkerSlots(thinker, config), media),
        talker_engine(host, spec, NxdiSlots(talker)),
        None,
    )
    return cpu_engines(spec), theirs


def test_a_folder_holds_the_listed_files_and_no_others(compiled) -> None:
    for folder in compiled.folders.values():
        held = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
        weights = "weights/tp0_sharded_checkpoint.safetensors"
        assert held == {"model.pt", "neuron_config.json", weights}


def test_every_graph_is_compiled_with_the_flags_of_its_kind(compiled) -> None:
    assert len(compiled.flags) == GRAPHS
    for flags in compiled.flags:
        for flag in (
            "--auto-cast=none",
            "--model-type=transformer",
            "--lnc=2",
            "--internal-enable-dge-levels vector_dynamic_offsets",
        ):
            assert f"{flag} " in flags
        prefill = "context_encoding_model" in flags
        assert ("-O1" in flags, "-O2" in flags) == (prefill, not prefill)
        folder = str(compiled.folders["thinker"])
        assert f"--logfile={folder}/" in flags  # and so what the compiler leaves is found


def test_steps_of_slots_in_any_order_are_the_cpus(engines, prompt_builder) -> None:
    ours, theirs = (both.thinker for both in engines)
    prompts = [
        prompt_builder.prompt(CASES["image-and-audio"].messages),
        prompt_of(torch.arange(1, 20)),
        prompt_of(torch.arange(1, 60)),
    ]
    tokens = [assert_prefills_alike(ours, theirs, s, prompt) for s, prompt in enumerate(prompts)]
    for order in ([1], [2, 0], [1, 2, 0], [0, 1], [2]):
        given = [tokens[slot] for slot in order]
        for slot, token in zip(
            order, assert_steps_alike(ours, theirs, order, given, steps=2), strict=True
        ):
            tokens[slot] = token


def test_frames_from_a_compiled_tree_are_the_cpus(engines, prompt_builder) -> None:
    prompt = prompt_builder.prompt(CASES["image-and-audio"].messages)
    assert_speaks_alike(*engines, 1, prompt, frames=4)


def test_a_graph_that_fails_is_told_in_its_first_call(compiled, config) -> None:
    """NxDI's own warm-up logs it and goes on."""
    other = DecoderSpec("thinker", config, replace(PLAN, prompt_buckets=(48, 96, 144)))
    graphs = NxdToolchain().load_decoder(other, compiled.folders["thinker"])
    with pytest.raises(Exception, match="no graph for inputs of"):
        warm_up_decoder(other, graphs)


@pytest.mark.parametrize("part", ["thinker", "talker"])
def test_every_graph_is_called_before_the_first_request(part, request, config, caplog) -> None:
    graphs = request.getfixturevalue(part)
    with caplog.at_level(logging.INFO, "qwen3_omni_neuron"):
        warm_up_decoder(DecoderSpec(part, config, PLAN), graphs)
    assert f"{part}: called each of {GRAPHS} graphs once" in caplog.text


def test_a_failed_compile_leaves_what_the_compiler_said(checkpoint, config, nxdi, tmp_path) -> None:
    from neuronx_distributed.trace import model_builder

    def refuse(*_args: object, **_options: object) -> None:
        raise RuntimeError("no such operation")

    plan = replace(PLAN, prompt_buckets=(144,), batches=(3,))
    with eager_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_builder, "neuron_xla_compile", refuse)
        spec = DecoderSpec("talker", config, plan)
        with pytest.raises(CompileError, match=r"talker was not compiled: .*no such operation"):
            NxdToolchain().compile_decoder(spec, Checkpoint(checkpoint), tmp_path)
    assert (tmp_path / "compiling" / "context_encoding_model").is_dir()
    assert not (tmp_path / "model.pt").exists()
