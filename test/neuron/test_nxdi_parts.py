"""Whole replies with every part in its compiled form, as far as one runs without a device: the
decoders over NxDI's CPU mode, all else over simulated graphs. Against the CPU engines."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_generation_defaults
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.neuron.nxdi.build import build_engines
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import DecoderGraphs
from testing.eager_neuron import EagerToolchain, eager_spec
from testing.media_cases import CASES
from testing.neuron.cpu_mode import decoder_in_cpu_mode
from testing.specs import cpu_engines

TEXT = [{"role": "user", "content": "What colour is the sky?"}]
LIMITS = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 12}
ASKED = [
    TEXT, CASES["image-and-audio"].messages, CASES["two-clips"].messages, CASES["video"].messages
]  # fmt: skip


class NxdiToolchain(EagerToolchain):
    """Its decoders are NxDI's."""

    def load_decoder(self, spec: DecoderSpec, folder: Path) -> DecoderGraphs:
        alone = replace(spec, plan=replace(spec.plan, tp=Degrees.same(1)))
        return decoder_in_cpu_mode(alone, Checkpoint(self._plan.model))


@pytest.fixture(scope="module")
def both(nxdi, checkpoint, config, prompt_builder) -> Iterator[tuple[Qwen3Omni, Qwen3Omni]]:
    spec = eager_spec(checkpoint)
    defaults = read_generation_defaults(checkpoint)

    def omni(engines: Engines) -> Qwen3Omni:
        return Qwen3Omni(config, defaults, prompt_builder, engines, max_queued=8)

    theirs = Engines.of(build_engines(spec, toolchain=NxdiToolchain(spec)))
    with omni(cpu_engines(spec)) as ours, omni(theirs) as over_parts:
        yield ours, over_parts


def test_replies_at_once_are_the_cpus(both) -> None:
    """Sampled, four on three slots, after every graph was called once to warm up."""
    ours, over_parts = both
    expected = [ours.generate_audio(m, seed=s + 5, **LIMITS) for s, m in enumerate(ASKED)]
    streams = [over_parts.stream(m, seed=s + 5, **LIMITS) for s, m in enumerate(ASKED)]
    for theirs, stream in zip(expected, streams, strict=True):
        *_, finished = stream
        result = finished.result
        assert result.token_ids == theirs.token_ids
        assert result.codes.tolist() == theirs.codes.tolist()
        assert len(result.codes) > 5
        assert np.abs(result.audio - theirs.audio).max() < 1e-4
