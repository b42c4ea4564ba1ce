"""The engines of all stages in C."""

from collections.abc import Sequence

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.cpu.encoders import CpuAudio, CpuVision
from qwen3_omni_neuron.cpu.native.audio_convolutions import NativeAudioConvolutions
from qwen3_omni_neuron.cpu.native.binding import Library
from qwen3_omni_neuron.cpu.native.code2wav import NativeCode2Wav
from qwen3_omni_neuron.cpu.native.encoder_layers import use_native_layers, use_native_linears
from qwen3_omni_neuron.cpu.native.predictor import NativePredictor
from qwen3_omni_neuron.cpu.native.steps import NativeSlots, NativeThinkerSlots
from qwen3_omni_neuron.cpu.native.talker import NativeTalker
from qwen3_omni_neuron.cpu.slots import talker_tables
from qwen3_omni_neuron.cpu.vocoder import CpuVocoder
from qwen3_omni_neuron.engines.media import MediaEncoders
from qwen3_omni_neuron.engines.protocols import StageEngines
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder


def native_engines(models: Models, spec: EngineSpec, library: Library) -> StageEngines:
    """Build the engines of `models`' stages, whose weights are packed."""
    built = StageEngines()
    if models.thinker is not None:
        built["encoder"] = encoder = _media_encoders(models, spec, library)
        built["thinker"] = _thinker(models, spec, library, encoder)
    if models.talker is not None:
        built["talker"] = _talker(models, spec, library)
    if models.code2wav is not None:
        plan, threads = spec.plan, spec.threads.get("vocoder", 1)
        calls = NativeCode2Wav(models.code2wav, library, threads)
        built["vocoder"] = CpuVocoder(calls, plan.max_concurrency, plan.chunk_frames)
    return built


def _media_encoders(models: Models, spec: EngineSpec, library: Library) -> MediaEncoders:
    assert models.audio_encoder and models.vision_encoder
    threads = spec.threads.get("thinker", 1)
    audio = native_audio(models.audio_encoder, library, threads)
    vision = native_vision(models.vision_encoder, library, threads, spec.plan.patch_buckets)
    return MediaEncoders(spec.config, audio, vision, spec.dtype)


def native_audio(encoder: AudioEncoder, library: Library, threads: int) -> CpuAudio:
    """Build the audio encoder over a module with packed weights, which it changes."""
    use_native_layers(encoder, library, threads)
    use_native_linears(encoder, library, threads)
    return CpuAudio(encoder, NativeAudioConvolutions(encoder, library, threads))


def native_vision(
    encoder: VisionEncoder, library: Library, threads: int, patch_buckets: Sequence[int] = ()
) -> CpuVision:
    """Build the vision encoder over a module with packed weights, which it changes."""
    use_native_layers(encoder, library, threads)
    use_native_linears(encoder, library, threads)
    return CpuVision(encoder, patch_buckets)


def _thinker(
    models: Models, spec: EngineSpec, library: Library, encoder: MediaEncoders
) -> ThinkerEngine:
    assert models.thinker
    plan, threads = spec.plan, spec.threads.get("thinker", 1)
    slots = NativeThinkerSlots(
        spec.config.thinker.text,
        models.thinker,
        plan.max_concurrency,
        plan.context_length,
        library,
        threads,
    )
    return ThinkerEngine(spec.config, slots, encoder)


def _talker(models: Models, spec: EngineSpec, library: Library) -> NativeTalker:
    c, plan, threads = spec.config.talker, spec.plan, spec.threads.get("talker", 1)
    assert c and models.talker and models.code_predictor
    assert models.text_projection and models.hidden_projection
    for projection in (models.text_projection, models.hidden_projection):
        use_native_linears(projection, library, threads)
    slots = NativeSlots(
        c.text, models.talker, plan.max_concurrency, plan.talker_context_length, library, threads
    )
    return NativeTalker(
        spec.config,
        slots,
        NativePredictor(c, models.code_predictor, library, threads),
        *talker_tables(models, spec),
        models.hidden_projection,
        spec.newline_id,
    )
