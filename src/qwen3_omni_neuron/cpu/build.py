"""Builds engines on the CPU from a checkpoint or a compiled tree, for all stages or some."""

from collections.abc import Callable, Sequence
from typing import Any

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES, Models
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.cpu.native.linear import use_native_linears
from qwen3_omni_neuron.cpu.precision import library_for
from qwen3_omni_neuron.cpu.predictor import CpuPredictor
from qwen3_omni_neuron.cpu.slots import Slots
from qwen3_omni_neuron.cpu.talker import NativeTalker
from qwen3_omni_neuron.cpu.thinker import CpuAudio, CpuThinker, CpuVision
from qwen3_omni_neuron.cpu.vocoder import CpuVocoder
from qwen3_omni_neuron.cpu.weights import load_checkpoint_models, load_compiled_models
from qwen3_omni_neuron.engines.media import MediaEncoders
from qwen3_omni_neuron.engines.protocols import DecoderSlots, StageEngines
from qwen3_omni_neuron.engines.talker import ROWS_AT_ONCE, TalkerEngine, TextRows


def build_engines(spec: EngineSpec, stages: Sequence[str] = STAGES) -> StageEngines:
    """Build the engines of some stages in this process, with the weights of those stages alone.

    stages: some of checkpoint.modules.STAGES; those that the checkpoint lacks are left out.
    Raises CheckpointError (see checkpoint.parameters.load_parts), ArtifactError (see cpu.weights).
    """
    library = library_for(spec.plan.dtype)
    if library is not None:
        library.grow_pool(max(spec.threads.values(), default=1))
    models, built = _models(spec, stages), StageEngines()
    if models.thinker is not None:
        built["encoder"] = encoder = media_encoders(models, spec, library)
        built["thinker"] = _thinker(models, spec, library, encoder)
    if models.talker is not None:
        built["talker"] = _talker(models, spec, library)
    if models.code2wav is not None:
        built["vocoder"] = vocoder_engine(models, spec, library)
    return built


def _models(spec: EngineSpec, stages: Sequence[str]) -> Models:
    dtype = spec.plan.dtype
    if spec.compiled is not None:
        return load_compiled_models(spec.compiled, spec.config, dtype, stages)
    return load_checkpoint_models(Checkpoint(spec.plan.model), spec.config, dtype, stages)


def _thinker(models: Models, spec: EngineSpec, library: Any, encoder: MediaEncoders) -> CpuThinker:
    assert models.thinker
    return CpuThinker(
        spec.config,
        models.thinker,
        encoder,
        spec.plan.max_concurrency,
        spec.plan.context_length,
        spec.plan.prompt_buckets,
        library,
        spec.threads.get("thinker", 1),
    )


def media_encoders(models: Models, spec: EngineSpec, library: Any = None) -> MediaEncoders:
    """Build the thinker's audio and vision encoder; in `library` over packed weights."""
    assert models.audio_encoder and models.vision_encoder
    threads = spec.threads.get("thinker", 1)
    for encoder in (models.audio_encoder, models.vision_encoder):
        use_native_linears(encoder, library, threads)
    audio = CpuAudio(models.audio_encoder, library, threads)
    vision = CpuVision(models.vision_encoder, spec.plan.patch_buckets)
    return MediaEncoders(spec.config, audio, vision, spec.dtype)


def _talker(models: Models, spec: EngineSpec, library: Any) -> TalkerEngine:
    assert models.talker and spec.config.talker
    decoder = Slots(
        spec.config.talker.text,
        models.talker,
        spec.plan.max_concurrency,
        spec.plan.talker_context_length,
        spec.dtype,
        spec.plan.prompt_buckets,
        library,
        spec.threads.get("talker", 1),
    )
    engine = TalkerEngine if library is None else NativeTalker
    return talker_engine(models, spec, decoder, library, engine)


def talker_engine(
    models: Models,
    spec: EngineSpec,
    decoder: DecoderSlots,
    library: Any = None,
    engine: Callable[..., TalkerEngine] = TalkerEngine,
) -> TalkerEngine:
    """Build the talker over its decoder, which may run elsewhere; the rest runs on the CPU.

    library: computes over packed weights; None: torch computes. engine: class of the engine.
    """
    assert models.codec_embedding and models.code_predictor and models.embedding
    assert spec.config.talker
    assert models.text_projection and models.hidden_projection
    threads = spec.threads.get("talker", 1)
    for projection in (models.text_projection, models.hidden_projection):
        use_native_linears(projection, library, threads)
    table, width = models.embedding.weight.detach(), spec.config.talker.text.hidden_size
    text_rows = TextRows(table, models.text_projection, width, spec.dtype)
    if len(table) <= ROWS_AT_ONCE:
        text_rows.fill()  # in one call now, so that no frame waits for a row
    return engine(
        spec.config,
        decoder,
        CpuPredictor(spec.config.talker, models.code_predictor, library, threads),
        models.codec_embedding.weight.detach().to(spec.dtype),
        text_rows,
        models.hidden_projection,
        spec.newline_id,
    )


def vocoder_engine(models: Models, spec: EngineSpec, library: Any = None) -> CpuVocoder:
    """Build the vocoder, in `library` or, if that is None, in torch."""
    assert models.code2wav
    return CpuVocoder(
        models.code2wav,
        spec.plan.max_concurrency,
        spec.plan.chunk_frames,
        library,
        spec.threads.get("vocoder", 1),
    )
