"""Compile and run every part with NxdToolchain over NxD's own ModelBuilder and NxDModel.

    python testing/neuron/builder_run.py CHECKPOINT FOLDER

The compiler and the runtime are those of testing/neuron/eager_part_device.py. Each part is
compiled, loaded, called and compared with the plain module; one line is printed for each. It runs
in a process of its own, since NxD has one parallel state for a process.
"""

import logging
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.errors import ArtifactError, CompileError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.engines import NeuronPredictor
from qwen3_omni_neuron.neuron.graphs.all import static_models
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import EXECUTABLE_FILE
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import NxdToolchain, compiler_flags
from testing.graph_cases import with_weights
from testing.models import load_models
from testing.neuron import eager_part_device
from testing.neuron.nxdi_sources import make_importable
from testing.outlier import (
    codes_of_engine,
    float32_codes,
    frame_inputs,
    predictor_spec,
    same_frames,
    talker_models,
)
from testing.part_cases import PLAIN_PARTS, PlainPart, calls_of, plain_spec
from testing.tiny import write_tiny_checkpoint

# float64: a bias is added after its product
assert_close = partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)


def main(checkpoint: Path, folder: Path) -> None:
    reason = make_importable()
    assert reason is None, reason
    os.environ["NXD_CPU_MODE"] = "0"  # CPU mode would trace nothing
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    from neuronx_distributed import NxDModel, NxDParallelState

    config = read_config(checkpoint)
    weights = load_models(Checkpoint(checkpoint), config, torch.float64)
    models = with_weights(static_models(config, torch.float64), weights)
    toolchain = NxdToolchain()
    for name in PLAIN_PARTS:
        spec, own = plain_spec(config, name, 1), folder / name
        own.mkdir()
        toolchain.compile_part(spec, Checkpoint(checkpoint), own)
        assert sorted(path.name for path in own.iterdir()) == [EXECUTABLE_FILE, "weights"]
        programs = eager_part_device.PROGRAMS[-len(spec.graphs) :]
        for graph, program in zip(spec.graphs, programs, strict=True):
            assert program.flags.startswith(compiler_flags(graph, spec.lnc))
        calls = 0
        # A module reads its group when it is called; a compiled graph would not.
        with NxDParallelState(lnc_size=spec.lnc), eager_part_device.device_memory():
            part = toolchain.load_part(spec, own)
            plain = PlainPart(part.graphs, getattr(models, name))
            for label, inputs in calls_of(part.graphs):
                given, expected = part.call(label, *inputs), plain.call(label, *inputs)
                assert_close(given, expected)
                calls += 1
        ways = max(map(len, NxDModel.load(str(own / EXECUTABLE_FILE)).input_shape_map.values()))
        sys.stdout.write(f"{name}: {calls} calls alike, up to {ways} graphs of equal inputs\n")
    assert_keeps_codes_of_float32(toolchain, folder)
    assert_refuses_what_does_not_fit(toolchain, config, folder / "code2wav")
    assert_traces_the_collectives(toolchain, config, Checkpoint(checkpoint), folder / "two")


def assert_keeps_codes_of_float32(toolchain: NxdToolchain, folder: Path) -> None:
    """Assert that over the published outlier the default, and not bfloat16, keeps the codes."""
    from neuronx_distributed import NxDParallelState

    checkpoint = write_tiny_checkpoint(folder / "checkpoint", outlier=True)
    reference, given = float32_codes(checkpoint), frame_inputs(talker_models(checkpoint))
    for value, least, most in (("mixed", 0.98, 1.0), ("same", 0.0, 0.5)):
        spec, own = predictor_spec(checkpoint, "neuron", value), folder / value
        own.mkdir()
        toolchain.compile_part(spec, Checkpoint(checkpoint), own)
        with NxDParallelState(lnc_size=spec.lnc), eager_part_device.device_memory():
            engine = NeuronPredictor(toolchain.load_part(spec, own), 64, None)
            codes = codes_of_engine(engine, given, torch.bfloat16)
        shares = same_frames(codes, reference)
        assert least <= min(shares) <= max(shares) <= most, (value, shares)
    sys.stdout.write("codes of float32 in mixed\n")


def assert_refuses_what_does_not_fit(
    toolchain: NxdToolchain, config: OmniConfig, folder: Path
) -> None:
    """Assert that graphs of another version, and a broken file, are refused."""
    spec = plain_spec(config, "code2wav", 1)
    *fewer, last = spec.graphs
    try:
        toolchain.load_part(replace(spec, graphs=tuple(fewer)), folder)
    except ArtifactError as error:
        assert f"graphs differ in {last.label}. Delete" in str(error), error
        sys.stdout.write("refused\n")
    (folder / EXECUTABLE_FILE).write_bytes(b"no archive")
    try:
        toolchain.load_part(spec, folder)
    except ArtifactError as error:
        assert f"{EXECUTABLE_FILE} can't be loaded" in str(error), error
        sys.stdout.write("refused\n")


def assert_traces_the_collectives(
    toolchain: NxdToolchain, config: OmniConfig, checkpoint: Checkpoint, folder: Path
) -> None:
    """Assert that over two ranks a layer asks XLA for a sum over both."""
    folder.mkdir()
    try:
        toolchain.compile_part(plain_spec(config, "audio_encoder", 2), checkpoint, folder)
    except CompileError as error:
        text = str(error)
        assert text.startswith("audio_encoder was not compiled: HLO generation failed: "), text
        assert text.count("torch_xla.core.xla_model.all_reduce needs the Neuron SDK") == 1, text
        sys.stdout.write("two ranks: as far as the sum\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
