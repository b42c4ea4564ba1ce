"""Engines over the graphs of a compiled tree, of all stages or of some."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES, load_tables
from qwen3_omni_neuron.compilation.plan import MODEL_OF_PART
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.media import MediaEncoders
from qwen3_omni_neuron.engines.protocols import StageEngines
from qwen3_omni_neuron.engines.talker import TalkerEngine, TextRows
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.neuron.engines.encoders import NeuronAudio, NeuronProjection, NeuronVision
from qwen3_omni_neuron.neuron.engines.predictor import NeuronPredictor
from qwen3_omni_neuron.neuron.engines.vocoder import NeuronVocoder
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec, decoder_spec
from qwen3_omni_neuron.neuron.nxdi.inputs import decoder_examples
from qwen3_omni_neuron.neuron.nxdi.nxd_toolchain import NxdToolchain
from qwen3_omni_neuron.neuron.nxdi.slots import NxdiSlots, NxdiThinkerSlots
from qwen3_omni_neuron.neuron.nxdi.toolchain import DecoderGraphs, Toolchain
from qwen3_omni_neuron.neuron.part import LoadedPart, log_warm_up, part_spec


def build_engines(
    spec: EngineSpec, stages: Sequence[str] = STAGES, toolchain: Toolchain | None = None
) -> StageEngines:
    """Load the engines of some stages in this process, and call every graph once.

    spec: its `compiled` is a tree that was opened (see compilation.tree.open_tree). stages: some of
    checkpoint.modules.STAGES. toolchain: None for the Neuron SDK's toolchain.
    Raises NotInstalledError without the SDK, ArtifactError for a tree that doesn't fit,
    CheckpointError (see checkpoint.parameters.load_parts), and the error of a graph's first call.
    Where it raises, everything that was loaded is closed.
    """
    loader, built = _Loader(spec, toolchain or NxdToolchain()), StageEngines()
    with ExitStack() as loaded:
        if "thinker" in stages:
            built["thinker"] = _thinker(spec, loader)
            loaded.callback(built["thinker"].close)
        if "talker" in stages and spec.config.talker is not None:
            built["talker"] = _talker(spec, loader)
            loaded.callback(built["talker"].close)
        if "vocoder" in stages and spec.config.code2wav is not None:
            built["vocoder"] = _vocoder(spec, loader)
        loaded.pop_all()
    return built


def warm_up_decoder(spec: DecoderSpec, graphs: DecoderGraphs) -> None:
    """Call every graph of a decoder once, so that no request waits for a graph's first call.

    The keys and values that it writes to slot 0 are overwritten by a prefill. Raises the error of a
    graph that fails.
    """
    started, count = time.monotonic(), 0
    for kind, _, inputs in decoder_examples(spec):
        call = graphs.prefill if kind == "prefill" else graphs.decode
        call(inputs)
        count += 1
    log_warm_up(spec.part, count, started)


class _Loader:
    """Loads parts and decoders of one compiled tree and warms them up."""

    def __init__(self, spec: EngineSpec, toolchain: Toolchain):
        assert spec.compiled is not None, "there is a tree to load from"
        self._spec, self._tree, self._toolchain = spec, spec.compiled, toolchain

    def part(self, name: str, loaded: ExitStack) -> LoadedPart:
        """Load a part other than the decoders, to be closed by `loaded`."""
        spec = part_spec(self._spec.config, self._spec.plan, name)
        part = self._toolchain.load_part(spec, self._folder(name))
        loaded.callback(part.close)
        part.warm_up()
        return part

    def decoder(self, name: str, loaded: ExitStack) -> DecoderGraphs:
        """Load a decoder, "thinker" or "talker", to be closed by `loaded`."""
        spec = decoder_spec(self._spec.config, self._spec.plan, name)
        graphs = self._toolchain.load_decoder(spec, self._folder(name))
        loaded.callback(graphs.close)
        _check_slots(name, graphs.spec.plan.max_concurrency, self._spec)
        warm_up_decoder(spec, graphs)
        return graphs

    def _folder(self, name: str) -> Path:
        return self._tree / MODEL_OF_PART[name] / name


def _thinker(spec: EngineSpec, loader: _Loader) -> ThinkerEngine:
    config, c = spec.config, spec.config.thinker
    with ExitStack() as loaded:
        graphs = loader.decoder("thinker", loaded)
        audio = NeuronAudio(loader.part("audio_encoder", loaded), c.audio)
        vision = NeuronVision(loader.part("vision_encoder", loaded), c.vision)
        media = MediaEncoders(config, audio, vision, spec.dtype)
        slots = NxdiThinkerSlots(graphs, config)
        return ThinkerEngine(config, slots, media, loaded.pop_all().close)


def _talker(spec: EngineSpec, loader: _Loader) -> TalkerEngine:
    config = spec.config
    assert config.talker is not None
    tables = load_tables(Checkpoint(spec.plan.model, spec.plan.adapters), config, spec.dtype)
    assert tables.embedding is not None and tables.codec_embedding is not None
    with ExitStack() as loaded:
        with ExitStack() as for_the_table:
            text = loader.part("text_projection", for_the_table)
            project_text = NeuronProjection(text, "text_projection")
            width = config.talker.text.hidden_size
            table = tables.embedding.weight.detach()
            text_rows = TextRows(table, project_text, width, spec.dtype).fill()
        graphs = loader.decoder("talker", loaded)
        predictor = loader.part("code_predictor", loaded)
        hidden = loader.part("hidden_projection", loaded)
        return TalkerEngine(
            config,
            NxdiSlots(graphs),
            NeuronPredictor(predictor, config.talker.predictor.vocab_size),
            tables.codec_embedding.weight,
            text_rows,
            NeuronProjection(hidden, "hidden_projection"),
            spec.newline_id,
            loaded.pop_all().close,
        )


def _vocoder(spec: EngineSpec, loader: _Loader) -> NeuronVocoder:
    assert spec.config.code2wav is not None
    with ExitStack() as loaded:
        vocoder = NeuronVocoder(loader.part("code2wav", loaded), spec.config.code2wav)
        _check_slots("vocoder", vocoder.slots, spec)
        loaded.pop_all()
        return vocoder


def _check_slots(stage: str, slots: int, spec: EngineSpec) -> None:
    planned = spec.plan.max_concurrency
    if slots != planned:
        raise ArtifactError(
            f"the {stage}'s graphs have {slots} slots, and the model is loaded with {planned}. "
            "Every stage has the same number: compile it again."
        )
