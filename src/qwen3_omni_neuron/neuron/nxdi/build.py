"""Engines over the graphs of a compiled tree."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from qwen3_omni_neuron.checkpoint.modules import STAGES
from qwen3_omni_neuron.compilation.plan import MODEL_OF_PART
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.protocols import StageEngines
from qwen3_omni_neuron.neuron.engines import NeuronVocoder, talker_engine, thinker_engine
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec, decoder_examples, decoder_spec
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import DecoderGraphs, NxdToolchain
from qwen3_omni_neuron.neuron.nxdi.slots import NxdiSlots, NxdiThinkerSlots
from qwen3_omni_neuron.neuron.part import LoadedPart, log_warm_up, part_spec


def build_engines(
    spec: EngineSpec, stages: Sequence[str] = STAGES, toolchain: NxdToolchain | None = None
) -> StageEngines:
    """Load some stages' engines in this process, and call every graph once.

    Raises NotInstalledError, ArtifactError, CheckpointError, a graph's error; all is closed then.
    """
    toolchain, built, config = toolchain or NxdToolchain(), StageEngines(), spec.config
    with ExitStack() as loaded:
        parts = {
            stage: loaded.enter_context(closing(_StageParts(spec, toolchain))) for stage in stages
        }
        if own := parts.get("thinker"):
            slots = NxdiThinkerSlots(own.decoder("thinker"), config)
            built["thinker"] = thinker_engine(spec, slots, own.part, own.close)
        if config.talker is not None and (own := parts.get("talker")):
            built["talker"] = talker_engine(
                spec, own.talker_slots, own.part, LoadedPart.close, own.close
            )
        if config.code2wav is not None and (own := parts.get("vocoder")):
            built["vocoder"] = NeuronVocoder(own.part("code2wav"), config.code2wav)
        loaded.pop_all()
    return built


def warm_up_decoder(spec: DecoderSpec, graphs: DecoderGraphs) -> None:
    """Call every graph of a decoder once, in slot 0."""
    started, count = time.monotonic(), 0
    for kind, _, inputs in decoder_examples(spec):
        call = graphs.prefill if kind == "prefill" else graphs.decode
        call(inputs)
        count += 1
    log_warm_up(spec.part, count, started)


class _StageParts:
    def __init__(self, spec: EngineSpec, toolchain: NxdToolchain):
        assert spec.compiled is not None, "needs a tree"
        self._spec, self._tree, self._toolchain = spec, spec.compiled, toolchain
        self._loaded = ExitStack()

    def part(self, name: str) -> LoadedPart:
        spec = part_spec(self._spec.config, self._spec.plan, name)
        part = self._toolchain.load_part(spec, self._folder(name))
        self._loaded.callback(part.close)
        part.warm_up()
        return part

    def decoder(self, name: str) -> DecoderGraphs:
        spec = decoder_spec(self._spec.config, self._spec.plan, name)
        graphs = self._toolchain.load_decoder(spec, self._folder(name))
        self._loaded.callback(graphs.close)
        warm_up_decoder(spec, graphs)
        return graphs

    def talker_slots(self) -> NxdiSlots:
        return NxdiSlots(self.decoder("talker"))

    def close(self) -> None:
        self._loaded.close()

    def _folder(self, name: str) -> Path:
        return self._tree / MODEL_OF_PART[name] / name
