"""From the graphs of a compiled tree to engines, all stages at once or one of them."""

from contextlib import ExitStack

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import load_tables
from qwen3_omni_neuron.engines.media import MediaEncoders
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.engines.talker import TalkerEngine, text_row_table
from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.neuron.engines.encoders import NeuronAudio, NeuronProjection, NeuronVision
from qwen3_omni_neuron.neuron.engines.predictor import NeuronPredictor
from qwen3_omni_neuron.neuron.engines.thinker import NeuronThinker
from qwen3_omni_neuron.neuron.engines.vocoder import NeuronVocoder
from qwen3_omni_neuron.neuron.engines.warm_up import warm_up, warm_up_decoder
from qwen3_omni_neuron.neuron.load import NeuronSpec
from qwen3_omni_neuron.neuron.loader import Loader
from qwen3_omni_neuron.neuron.nxdi.slots import DecoderGraphs, NxdiSlots
from qwen3_omni_neuron.neuron.part.part import LoadedPart

NeuronEngine = NeuronThinker | TalkerEngine | NeuronVocoder


def build_neuron_engines(spec: NeuronSpec) -> Engines:
    """All engines in this process, every graph called once.

    Raises ArtifactError for a tree that doesn't fit, CheckpointError (see weights.load_parts), and
    what a graph's first call raises; what was loaded is given back then.
    """
    loader = _loader(spec)
    with ExitStack() as built:
        thinker = _thinker(spec, loader)
        built.callback(thinker.close)
        talker, vocoder = None, None
        if spec.engine.config.talker is not None and spec.engine.config.code2wav is not None:
            talker = _talker(spec, loader)
            built.callback(talker.close)
            vocoder = _vocoder(spec, loader)
        built.pop_all()
    return Engines(thinker, talker, vocoder)


def build_neuron_engine(spec: NeuronSpec, stage: str) -> NeuronEngine:
    """One stage's engine, as `build_neuron_engines`. stage: one of loading.STAGES."""
    loader = _loader(spec)
    if stage == "thinker":
        return _thinker(spec, loader)
    return _talker(spec, loader) if stage == "talker" else _vocoder(spec, loader)


def _loader(spec: NeuronSpec) -> Loader:
    assert spec.make_loader is not None, "a spec of NxDI's CPU mode has no compiled tree"
    return spec.make_loader(spec)


def _thinker(spec: NeuronSpec, loader: Loader) -> NeuronThinker:
    config, dtype = spec.engine.config, spec.engine.dtype
    c = config.thinker
    with ExitStack() as loaded:
        graphs = _load_decoder(spec, loader, loaded, "thinker")
        audio = NeuronAudio(_load(loader, loaded, "audio_encoder"), c.audio)
        vision = NeuronVision(_load(loader, loaded, "vision_encoder"), c.vision)
        media = MediaEncoders(config, audio, vision, dtype)
        return NeuronThinker(config, NxdiSlots(graphs), media, dtype, loaded.pop_all().close)


def _talker(spec: NeuronSpec, loader: Loader) -> TalkerEngine:
    config = spec.engine.config
    assert config.talker is not None
    tables = load_tables(Checkpoint(spec.engine.plan.model), config, spec.engine.dtype)
    assert tables.embedding is not None and tables.codec_embedding is not None
    with ExitStack() as loaded:
        with ExitStack() as for_the_table:
            text = _load(loader, for_the_table, "text_projection")
            project_text = NeuronProjection(text, "text_projection")
            text_rows = text_row_table(tables.embedding.weight, project_text)
        graphs = _load_decoder(spec, loader, loaded, "talker")
        predictor = _load(loader, loaded, "code_predictor")
        hidden = _load(loader, loaded, "hidden_projection")
        return TalkerEngine(
            config,
            NxdiSlots(graphs),
            NeuronPredictor(predictor, config.talker.predictor.vocab_size),
            tables.codec_embedding.weight,
            text_rows,
            NeuronProjection(hidden, "hidden_projection"),
            spec.engine.newline_id,
            loaded.pop_all().close,
        )


def _vocoder(spec: NeuronSpec, loader: Loader) -> NeuronVocoder:
    assert spec.engine.config.code2wav is not None
    with ExitStack() as loaded:
        vocoder = NeuronVocoder(_load(loader, loaded, "code2wav"), spec.engine.config.code2wav)
        _check_slots("vocoder", vocoder.slots, spec)
        loaded.pop_all()
        return vocoder


def _load(loader: Loader, loaded: ExitStack, name: str) -> LoadedPart:
    """A part, warm, which `loaded` closes."""
    part = loader.load_part(name)
    loaded.callback(part.close)
    warm_up(name, part)
    return part


def _load_decoder(spec: NeuronSpec, loader: Loader, loaded: ExitStack, name: str) -> DecoderGraphs:
    """As `_load`."""
    graphs = loader.load_decoder(name)
    loaded.callback(graphs.close)
    _check_slots(name, graphs.plan.slots, spec)
    warm_up_decoder(name, graphs, spec.engine.config)
    return graphs


def _check_slots(stage: str, slots: int, spec: NeuronSpec) -> None:
    wanted = spec.engine.plan.max_concurrency
    if slots != wanted:
        raise ArtifactError(
            f"the {stage}'s graphs have {slots} slots, and the model is loaded with {wanted}. "
            "Every stage has the same number: compile it again."
        )
