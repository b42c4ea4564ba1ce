"""The engines of thinker and talker over their slots and parts, however a target loads these."""

from collections.abc import Callable

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import load_tables
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.media import MediaEncoders
from qwen3_omni_neuron.engines.protocols import DecoderSlots, Fault, ThinkerSlots
from qwen3_omni_neuron.engines.talker import TalkerEngine, TextRows
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.neuron.engines.encoders import NeuronAudio, NeuronProjection, NeuronVision
from qwen3_omni_neuron.neuron.engines.predictor import NeuronPredictor
from qwen3_omni_neuron.neuron.part import LoadedPart

LoadPart = Callable[[str], LoadedPart]
"""Loads a part by its name, and calls each of its graphs once."""


def thinker_engine(
    spec: EngineSpec,
    slots: ThinkerSlots,
    part: LoadPart,
    release: Callable[[], None],
    fault: Fault | None = None,
) -> ThinkerEngine:
    """Load the encoders, and make the engine. release, fault: see engines.slots.DecoderEngine."""
    c = spec.config.thinker
    audio = NeuronAudio(part("audio_encoder"), c.audio)
    vision = NeuronVision(part("vision_encoder"), c.vision)
    media = MediaEncoders(spec.config, audio, vision, spec.dtype)
    return ThinkerEngine(spec.config, slots, media, release, fault)


def talker_engine(
    spec: EngineSpec,
    slots: Callable[[], DecoderSlots],
    part: LoadPart,
    unload: Callable[[LoadedPart], object],
    release: Callable[[], None],
    fault: Fault | None = None,
) -> TalkerEngine:
    """Make the table of text rows, load the other parts, and make the engine.

    slots: loads the decoder; called when the text projection was released by `unload`. release,
    fault: see engines.slots.DecoderEngine.
    """
    config = spec.config
    tables = load_tables(Checkpoint(spec.plan.model, spec.plan.adapters), config, spec.dtype)
    assert config.talker and tables.embedding and tables.codec_embedding
    text = part("text_projection")
    table, project_text = tables.embedding.weight.detach(), NeuronProjection(text, text.name)
    text_rows = TextRows(table, project_text, config.talker.text.hidden_size, spec.dtype).fill()
    unload(text)
    return TalkerEngine(
        config,
        slots(),
        NeuronPredictor(part("code_predictor"), config.talker.predictor.vocab_size),
        tables.codec_embedding.weight,
        text_rows,
        NeuronProjection(part("hidden_projection"), "hidden_projection"),
        spec.newline_id,
        release,
        fault,
    )
