"""Engines on the CPU over a checkpoint, all stages at once or one of them."""

from dataclasses import dataclass
from pathlib import Path

import torch

from qwen3_omni_neuron.checkpoint import Checkpoint
from qwen3_omni_neuron.config import OmniConfig, TalkerConfig
from qwen3_omni_neuron.cpu.audio import CpuAudio
from qwen3_omni_neuron.cpu.talker import CpuTalker
from qwen3_omni_neuron.cpu.text_rows import text_row_table
from qwen3_omni_neuron.cpu.thinker import CpuThinker
from qwen3_omni_neuron.cpu.vision import CpuVision
from qwen3_omni_neuron.cpu.vocoder import CpuVocoder
from qwen3_omni_neuron.loading import Models, load_models
from qwen3_omni_neuron.model.talker_prompt import ASSISTANT_ROWS
from qwen3_omni_neuron.runtime.protocols import Engines

MOST_FRAMES = 4096


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


def build_engines(spec: EngineSpec) -> Engines:
    """All engines in this process. Raises CheckpointError (see weights.load_parts)."""
    models = load_models(Checkpoint(spec.folder), spec.config, spec.dtype)
    thinker = _thinker(models, spec)
    if models.talker is None or models.code2wav is None:
        return Engines(thinker, None, None)
    return Engines(thinker, _talker(models, spec), _vocoder(models, spec))


def build_engine(spec: EngineSpec, stage: str) -> CpuThinker | CpuTalker | CpuVocoder:
    """One stage's engine, with the weights of that stage alone. stage: one of loading.STAGES."""
    models = load_models(Checkpoint(spec.folder), spec.config, spec.dtype, (stage,))
    if stage == "thinker":
        return _thinker(models, spec)
    return _talker(models, spec) if stage == "talker" else _vocoder(models, spec)


def talker_context_length(config: TalkerConfig, context_length: int) -> int:
    """Positions of the talker's KV cache: the longest prompt, its assistant rows, and as many
    frames as a request speaks by default."""
    return min(config.text.max_positions, context_length + ASSISTANT_ROWS + MOST_FRAMES)


def _thinker(models: Models, spec: EngineSpec) -> CpuThinker:
    assert models.thinker and models.audio_encoder and models.vision_encoder
    return CpuThinker(
        spec.config,
        models.thinker,
        CpuAudio(models.audio_encoder),
        CpuVision(models.vision_encoder, spec.patch_buckets),
        spec.slots,
        spec.context_length,
        spec.prompt_buckets,
    )


def _talker(models: Models, spec: EngineSpec) -> CpuTalker:
    assert models.talker and models.code_predictor and models.embedding and spec.config.talker
    assert models.text_projection and models.hidden_projection
    return CpuTalker(
        spec.config,
        models.talker,
        models.code_predictor,
        text_row_table(models.embedding.weight, models.text_projection),
        models.hidden_projection,
        spec.newline_id,
        spec.slots,
        talker_context_length(spec.config.talker, spec.context_length),
        spec.prompt_buckets,
    )


def _vocoder(models: Models, spec: EngineSpec) -> CpuVocoder:
    assert models.code2wav
    return CpuVocoder(models.code2wav, spec.slots)
