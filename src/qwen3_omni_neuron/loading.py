"""From a checkpoint to the modules of model/, all of them or those of one stage."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint import Checkpoint
from qwen3_omni_neuron.config import OmniConfig, TalkerConfig
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.talker_prompt import ResizeMlp
from qwen3_omni_neuron.model.thinker import Thinker
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder
from qwen3_omni_neuron.weights import (
    Part,
    audio_encoder_pieces,
    code2wav_pieces,
    code_predictor_pieces,
    embedding_pieces,
    load_parts,
    projection_pieces,
    talker_pieces,
    thinker_pieces,
    vision_encoder_pieces,
)

STAGES = ("thinker", "talker", "vocoder")


@dataclass
class Models:
    """The modules of model/ with their weights; None for a stage that was not loaded.

    embedding: the thinker's table, which the talker's text rows are projected from.
    """

    thinker: Thinker | None = None
    audio_encoder: AudioEncoder | None = None
    vision_encoder: VisionEncoder | None = None
    embedding: nn.Embedding | None = None
    talker: Talker | None = None
    text_projection: ResizeMlp | None = None
    hidden_projection: ResizeMlp | None = None
    code_predictor: CodePredictor | None = None
    code2wav: Code2Wav | None = None


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
    models, parts = lay_out(config, stages)
    load_parts(parts, checkpoint, dtype)
    return models


def lay_out(config: OmniConfig, stages: Collection[str] = STAGES) -> tuple[Models, list[Part]]:
    """The modules of some stages with parameters on the meta device, and what fills them.

    Buffers, which no checkpoint holds, are on the CPU and have their values.
    """
    with torch.device("meta"):
        models = Models()
        parts: list[Part] = []
        if "thinker" in stages:
            parts += _thinker_parts(models, config)
        if "talker" in stages and config.talker is not None:
            parts += _talker_parts(models, config, config.talker)
        if "vocoder" in stages and config.code2wav is not None:
            models.code2wav = Code2Wav(config.code2wav)
            parts.append(Part(models.code2wav, code2wav_pieces(config.code2wav), ("code2wav.",)))
    return models, parts


def fill(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Put tensors, by name, in the place of a module's parameters and buffers: no copy."""
    for name, tensor in tensors:
        owner, _, attribute = name.rpartition(".")
        kept = module.get_submodule(owner)
        weight = attribute in dict(kept.named_parameters(recurse=False))
        own = nn.Parameter(tensor.detach(), requires_grad=False) if weight else tensor
        setattr(kept, attribute, own)


def _thinker_parts(models: Models, config: OmniConfig) -> list[Part]:
    c = config.thinker
    accept_layer = config.talker.accept_hidden_layer if config.talker else 0
    models.thinker = Thinker(c, accept_layer)
    models.embedding = models.thinker.embedding
    models.audio_encoder = AudioEncoder(c.audio)
    models.vision_encoder = VisionEncoder(c.vision)
    return [
        Part(models.thinker, thinker_pieces(c), ("thinker.model.", "thinker.lm_head.")),
        Part(models.audio_encoder, audio_encoder_pieces(c.audio), ("thinker.audio_tower.",)),
        Part(models.vision_encoder, vision_encoder_pieces(c.vision), ("thinker.visual.",)),
    ]


def _talker_parts(models: Models, config: OmniConfig, c: TalkerConfig) -> list[Part]:
    parts = []
    if models.embedding is None:
        text = config.thinker.text
        models.embedding = nn.Embedding(text.vocab_size, text.hidden_size)
        parts.append(Part(models.embedding, embedding_pieces(), ()))
    models.talker = Talker(c)
    models.text_projection, models.hidden_projection = ResizeMlp(c), ResizeMlp(c)
    models.code_predictor = CodePredictor(c, models.talker.codec_embedding)
    return [
        *parts,
        Part(models.talker, talker_pieces(c), ("talker.",)),
        Part(models.text_projection, projection_pieces("text_projection"), ()),
        Part(models.hidden_projection, projection_pieces("hidden_projection"), ()),
        Part(models.code_predictor, code_predictor_pieces(c), ()),
    ]
