"""From a checkpoint to engines on the CPU."""

from dataclasses import dataclass

import torch

from qwen3_omni_neuron.checkpoint import Checkpoint
from qwen3_omni_neuron.config import OmniConfig, TalkerConfig
from qwen3_omni_neuron.cpu.talker import CpuTalker
from qwen3_omni_neuron.cpu.text_rows import TextRows
from qwen3_omni_neuron.cpu.thinker import CpuThinker
from qwen3_omni_neuron.cpu.vocoder import CpuVocoder
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.talker import Talker
from qwen3_omni_neuron.model.talker_prompt import ASSISTANT_ROWS, ResizeMlp
from qwen3_omni_neuron.model.thinker import Thinker
from qwen3_omni_neuron.runtime.protocols import Engines
from qwen3_omni_neuron.weights import (
    Part,
    audio_encoder_pieces,
    code2wav_pieces,
    code_predictor_pieces,
    load_parts,
    projection_pieces,
    talker_pieces,
    thinker_pieces,
)

MOST_FRAMES = 4096


@dataclass(frozen=True)
class Models:
    """The modules of model/ with their weights; the speech ones are None in a text-only one."""

    thinker: Thinker
    audio_encoder: AudioEncoder
    talker: Talker | None = None
    text_projection: ResizeMlp | None = None
    hidden_projection: ResizeMlp | None = None
    code_predictor: CodePredictor | None = None
    code2wav: Code2Wav | None = None


def load_models(
    checkpoint: Checkpoint, config: OmniConfig, dtype: torch.dtype, context_length: int
) -> Models:
    """Read the weights once, converted to `dtype` as they are copied.

    context_length: positions of a thinker slot's KV cache.
    Raises CheckpointError (see weights.load_parts).
    """
    accept_layer = config.talker.accept_hidden_layer if config.talker else 0
    with torch.device("meta"):
        thinker = Thinker(config.thinker, accept_layer, context_length)
        encoder = AudioEncoder(config.thinker.audio)
        parts = [
            Part(
                thinker,
                thinker_pieces(config.thinker),
                ("thinker.model.", "thinker.lm_head."),
            ),
            Part(
                encoder,
                audio_encoder_pieces(config.thinker.audio),
                ("thinker.audio_tower.",),
            ),
        ]
        if config.talker is None or config.code2wav is None:
            models = Models(thinker, encoder)
        else:
            talker = Talker(config.talker, talker_context_length(config.talker, context_length))
            models = Models(
                thinker,
                encoder,
                talker,
                ResizeMlp(config.talker),
                ResizeMlp(config.talker),
                CodePredictor(config.talker, talker.codec_embedding),
                Code2Wav(config.code2wav),
            )
            parts += _speech_parts(models, config)
    load_parts(parts, checkpoint, dtype)
    return models


def talker_context_length(config: TalkerConfig, context_length: int) -> int:
    """Positions of the talker's KV cache: the longest prompt, its assistant rows, and as many
    frames as a request speaks by default."""
    return min(config.text.max_positions, context_length + ASSISTANT_ROWS + MOST_FRAMES)


def build_engines(
    models: Models, config: OmniConfig, newline_id: int, slots: int, context_length: int
) -> Engines:
    """Engines over loaded models. newline_id: the token of the line break after a role."""
    thinker = CpuThinker(
        config.thinker, models.thinker, models.audio_encoder, slots, context_length
    )
    if models.talker is None:
        return Engines(thinker, None, None)
    assert config.talker and models.text_projection and models.hidden_projection
    assert models.code_predictor and models.code2wav
    talker = CpuTalker(
        config,
        models.talker,
        models.code_predictor,
        TextRows(models.thinker.embedding.weight, models.text_projection),
        models.hidden_projection,
        newline_id,
        slots,
        talker_context_length(config.talker, context_length),
    )
    return Engines(thinker, talker, CpuVocoder(models.code2wav))


def _speech_parts(models: Models, config: OmniConfig) -> list[Part]:
    assert config.talker is not None and config.code2wav is not None
    assert models.talker and models.text_projection and models.hidden_projection
    assert models.code_predictor and models.code2wav
    return [
        Part(models.talker, talker_pieces(config.talker), ("talker.",)),
        Part(models.text_projection, projection_pieces("text_projection"), ()),
        Part(models.hidden_projection, projection_pieces("hidden_projection"), ()),
        Part(models.code_predictor, code_predictor_pieces(config.talker), ()),
        Part(models.code2wav, code2wav_pieces(config.code2wav), ("code2wav.",)),
    ]
