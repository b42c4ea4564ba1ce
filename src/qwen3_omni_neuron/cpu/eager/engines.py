"""The engines of all stages in torch: the modules of model/, called as they are."""

import torch

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.cpu.eager.code2wav import EagerCode2Wav
from qwen3_omni_neuron.cpu.eager.slots import EagerSlots
from qwen3_omni_neuron.cpu.eager.thinker import EagerThinker
from qwen3_omni_neuron.cpu.encoders import CpuAudio, CpuVision
from qwen3_omni_neuron.cpu.predictor import CpuPredictor
from qwen3_omni_neuron.cpu.tables import talker_tables
from qwen3_omni_neuron.cpu.vocoder import CpuVocoder
from qwen3_omni_neuron.engines.media import MediaEncoders
from qwen3_omni_neuron.engines.protocols import DecoderSlots, StageEngines
from qwen3_omni_neuron.engines.talker import TalkerEngine
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.thinker import Thinker


def eager_engines(models: Models, spec: EngineSpec) -> StageEngines:
    """Build the engines of the stages that `models` has."""
    plan, c, built = spec.plan, spec.config, StageEngines()
    if models.thinker is not None:
        built["encoder"] = encoder = media_encoders(models, spec)
        slots = _slots(c.thinker.text, models.thinker, spec, plan.context_length)
        built["thinker"] = EagerThinker(c, models.thinker, encoder, slots)
    if models.talker is not None:
        assert c.talker
        slots = _slots(c.talker.text, models.talker, spec, plan.talker_context_length)
        built["talker"] = talker_engine(models, spec, slots)
    if models.code2wav is not None:
        built["vocoder"] = vocoder_engine(models, spec)
    return built


def _slots(
    c: DecoderConfig, model: Thinker | Talker, spec: EngineSpec, context_length: int
) -> EagerSlots:
    slots, buckets = spec.plan.max_concurrency, spec.plan.prompt_buckets
    return EagerSlots(c, model, slots, context_length, spec.cache_dtype, buckets)


def media_encoders(models: Models, spec: EngineSpec) -> MediaEncoders:
    """Build the thinker's audio and vision encoder."""
    assert models.audio_encoder and models.vision_encoder
    audio = CpuAudio(models.audio_encoder)
    vision = CpuVision(models.vision_encoder, spec.plan.patch_buckets)
    return MediaEncoders(spec.config, audio, vision, spec.dtype)


def talker_engine(models: Models, spec: EngineSpec, decoder: DecoderSlots) -> TalkerEngine:
    """Build the talker over its decoder, which may run elsewhere; the rest runs here."""
    c = spec.config.talker
    assert c and models.code_predictor and models.hidden_projection
    arithmetic = getattr(torch, spec.plan.predictor_arithmetic)
    predictor = CpuPredictor(models.code_predictor, c.code_groups, arithmetic)
    tables, project_hidden = talker_tables(models, spec), models.hidden_projection
    return TalkerEngine(spec.config, decoder, predictor, *tables, project_hidden, spec.newline_id)


def vocoder_engine(models: Models, spec: EngineSpec) -> CpuVocoder:
    """Build the vocoder."""
    assert models.code2wav
    calls = EagerCode2Wav(models.code2wav)
    return CpuVocoder(calls, spec.plan.max_concurrency, spec.plan.chunk_frames)
