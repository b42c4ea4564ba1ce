"""From a checkpoint to engines on the CPU, all stages at once or one of them."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from qwen3_omni_neuron.checkpoint import Checkpoint
from qwen3_omni_neuron.config import Code2WavConfig, OmniConfig, TalkerConfig
from qwen3_omni_neuron.cpu.audio import CpuAudio
from qwen3_omni_neuron.cpu.prompt_media import MediaEncoders
from qwen3_omni_neuron.cpu.slots import DecoderSlots, Slots
from qwen3_omni_neuron.cpu.talker import CpuTalker
from qwen3_omni_neuron.cpu.text_rows import text_row_table
from qwen3_omni_neuron.cpu.thinker import CpuThinker
from qwen3_omni_neuron.cpu.vision import CpuVision
from qwen3_omni_neuron.cpu.vocoder import CpuVocoder
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.talker_prompt import ASSISTANT_ROWS, ResizeMlp
from qwen3_omni_neuron.model.thinker import Thinker
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder
from qwen3_omni_neuron.runtime.protocols import Engines
from qwen3_omni_neuron.weights import (
    Part,
    audio_encoder_pieces,
    code2wav_pieces,
    code_predictor_pieces,
    codec_embedding_pieces,
    embedding_pieces,
    load_parts,
    projection_pieces,
    talker_pieces,
    thinker_pieces,
    vision_encoder_pieces,
)

MOST_FRAMES = 4096
STAGES = ("thinker", "talker", "vocoder")


@dataclass(frozen=True)
class EngineSpec:
    """What engines are built from; small, so that it can be sent to a process of its own.

    newline_id: the token of the line break after a role. slots: how many requests at a time.
    context_length: positions of a thinker slot's KV cache. prompt_buckets, patch_buckets: lengths
    that prompts, and the frames of pictures, are padded to, ascending; none: no padding, which a
    CPU does not need.
    """

    folder: Path
    config: OmniConfig
    dtype: torch.dtype
    newline_id: int
    slots: int
    context_length: int
    prompt_buckets: tuple[int, ...] = ()
    patch_buckets: tuple[int, ...] = ()


@dataclass
class Models:
    """The modules of model/ with their weights; None for what was not loaded.

    embedding: the thinker's table, which the talker's text rows are projected from.
    codec_embedding: the talker's.
    """

    thinker: Thinker | None = None
    audio_encoder: AudioEncoder | None = None
    vision_encoder: VisionEncoder | None = None
    embedding: nn.Embedding | None = None
    talker: Talker | None = None
    codec_embedding: nn.Embedding | None = None
    text_projection: ResizeMlp | None = None
    hidden_projection: ResizeMlp | None = None
    code_predictor: CodePredictor | None = None
    code2wav: Code2Wav | None = None


def build_engines(spec: EngineSpec) -> Engines:
    """All engines in this process. Raises CheckpointError (see weights.load_parts)."""
    models = load_models(Checkpoint(spec.folder), spec.config, spec.dtype)
    thinker = _thinker(models, spec)
    if models.talker is None or models.code2wav is None:
        return Engines(thinker, None, None)
    return Engines(thinker, _talker(models, spec), vocoder_engine(models, spec))


def build_engine(spec: EngineSpec, stage: str) -> CpuThinker | CpuTalker | CpuVocoder:
    """One stage's engine, with the weights of that stage alone. stage: one of STAGES."""
    models = load_models(Checkpoint(spec.folder), spec.config, spec.dtype, (stage,))
    if stage == "thinker":
        return _thinker(models, spec)
    return _talker(models, spec) if stage == "talker" else vocoder_engine(models, spec)


def load_models(
    checkpoint: Checkpoint,
    config: OmniConfig,
    dtype: torch.dtype,
    stages: Collection[str] = STAGES,
) -> Models:
    """Read the weights of some stages once, converted to `dtype` as they are copied.

    Talker and vocoder are left out where the checkpoint has none. Raises CheckpointError (see
    weights.load_parts).
    """
    with torch.device("meta"):
        models = Models()
        parts: list[Part] = []
        if "thinker" in stages:
            parts += _thinker_parts(models, config)
        if "talker" in stages and config.talker is not None:
            parts += _talker_parts(models, config, config.talker)
        if "vocoder" in stages and config.code2wav is not None:
            parts.append(_vocoder_part(models, config.code2wav))
    load_parts(parts, checkpoint, dtype)
    return models


def load_host_models(checkpoint: Checkpoint, config: OmniConfig, dtype: torch.dtype) -> Models:
    """As load_models, without the decoders of thinker and talker: for engines that run those
    elsewhere."""
    with torch.device("meta"):
        models = Models()
        parts = [*_encoder_parts(models, config), _embedding_part(models, config)]
        if config.talker is not None:
            text = config.talker.text
            models.codec_embedding = nn.Embedding(text.vocab_size, text.hidden_size)
            parts.append(Part(models.codec_embedding, codec_embedding_pieces(), ()))
            parts += _beside_talker_parts(models, config.talker)
        if config.code2wav is not None:
            parts.append(_vocoder_part(models, config.code2wav))
    load_parts(parts, checkpoint, dtype)
    return models


def talker_context_length(config: TalkerConfig, context_length: int) -> int:
    """Positions of the talker's KV cache: the longest prompt, its assistant rows, and as many
    frames as a request speaks by default."""
    return min(config.text.max_positions, context_length + ASSISTANT_ROWS + MOST_FRAMES)


def _thinker_parts(models: Models, config: OmniConfig) -> list[Part]:
    c = config.thinker
    accept_layer = config.talker.accept_hidden_layer if config.talker else 0
    models.thinker = Thinker(c, accept_layer)
    models.embedding = models.thinker.embedding
    return [
        Part(models.thinker, thinker_pieces(c), ("thinker.model.", "thinker.lm_head.")),
        *_encoder_parts(models, config),
    ]


def _encoder_parts(models: Models, config: OmniConfig) -> list[Part]:
    c = config.thinker
    models.audio_encoder = AudioEncoder(c.audio)
    models.vision_encoder = VisionEncoder(c.vision)
    return [
        Part(models.audio_encoder, audio_encoder_pieces(c.audio), ("thinker.audio_tower.",)),
        Part(models.vision_encoder, vision_encoder_pieces(c.vision), ("thinker.visual.",)),
    ]


def _embedding_part(models: Models, config: OmniConfig) -> Part:
    text = config.thinker.text
    models.embedding = nn.Embedding(text.vocab_size, text.hidden_size)
    return Part(models.embedding, embedding_pieces(), ())


def _talker_parts(models: Models, config: OmniConfig, c: TalkerConfig) -> list[Part]:
    parts = []
    if models.embedding is None:
        parts.append(_embedding_part(models, config))
    models.talker = Talker(c)
    models.codec_embedding = models.talker.codec_embedding
    return [
        *parts,
        Part(models.talker, talker_pieces(c), ("talker.",)),
        *_beside_talker_parts(models, c),
    ]


def _beside_talker_parts(models: Models, c: TalkerConfig) -> list[Part]:
    assert models.codec_embedding
    models.text_projection, models.hidden_projection = ResizeMlp(c), ResizeMlp(c)
    models.code_predictor = CodePredictor(c, models.codec_embedding)
    return [
        Part(models.text_projection, projection_pieces("text_projection"), ()),
        Part(models.hidden_projection, projection_pieces("hidden_projection"), ()),
        Part(models.code_predictor, code_predictor_pieces(c), ()),
    ]


def _vocoder_part(models: Models, c: Code2WavConfig) -> Part:
    models.code2wav = Code2Wav(c)
    return Part(models.code2wav, code2wav_pieces(c), ("code2wav.",))


def _thinker(models: Models, spec: EngineSpec) -> CpuThinker:
    assert models.thinker
    return CpuThinker(
        spec.config,
        models.thinker,
        media_encoders(models, spec),
        spec.slots,
        spec.context_length,
        spec.prompt_buckets,
    )


def media_encoders(models: Models, spec: EngineSpec) -> MediaEncoders:
    """The thinker's encoders, on the CPU."""
    assert models.audio_encoder and models.vision_encoder
    audio = CpuAudio(models.audio_encoder)
    vision = CpuVision(models.vision_encoder, spec.patch_buckets)
    return MediaEncoders(spec.config, audio, vision, spec.dtype)


def _talker(models: Models, spec: EngineSpec) -> CpuTalker:
    assert models.talker and spec.config.talker
    decoder = Slots(
        spec.config.talker.text,
        models.talker,
        models.talker.codec_embedding.weight[:1],
        spec.slots,
        talker_context_length(spec.config.talker, spec.context_length),
        spec.dtype,
        spec.prompt_buckets,
    )
    return talker_engine(models, spec, decoder)


def talker_engine(models: Models, spec: EngineSpec, decoder: DecoderSlots) -> CpuTalker:
    """The talker over its decoder, wherever that runs; all else is on the CPU."""
    assert models.codec_embedding and models.code_predictor and models.embedding
    assert models.text_projection and models.hidden_projection
    return CpuTalker(
        spec.config,
        decoder,
        models.codec_embedding.weight,
        models.code_predictor,
        text_row_table(models.embedding.weight, models.text_projection),
        models.hidden_projection,
        spec.newline_id,
    )


def vocoder_engine(models: Models, spec: EngineSpec) -> CpuVocoder:
    """The vocoder, on the CPU."""
    assert models.code2wav
    return CpuVocoder(models.code2wav, spec.slots)
