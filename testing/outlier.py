"""Frames for the code predictor of a checkpoint with the published outlier, and their codes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models, lay_out
from qwen3_omni_neuron.checkpoint.parameters import load_parts
from qwen3_omni_neuron.engines.noise import noise_of_frame
from qwen3_omni_neuron.engines.protocols import Predictor, PredictorSampling
from qwen3_omni_neuron.model.code_predictor import CodePredictor, top_p_limits
from qwen3_omni_neuron.neuron.part import PartSpec, part_spec
from testing.graph_cases import TINY_PLAN

FRAMES = 296  # as many as were published
TOP_P = 0.8
Codes = tuple[Tensor, Tensor]
"""Codes int64 [FRAMES, 16], greedy and sampled."""


def talker_models(folder: Path, dtype: torch.dtype = torch.float32) -> Models:
    """Load the modules of the talker's stage."""
    models, parts = lay_out(read_config(folder), ("talker",))
    load_parts(list(parts.values()), Checkpoint(folder), dtype)
    return models


def frame_inputs(models: Models) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, code 0, noise and top_p, float32, of FRAMES frames.

    The hidden states are bfloat16 numbers of the size of the talker's.
    """
    assert models.talker is not None and models.code_predictor is not None
    draw = torch.Generator().manual_seed(0)
    gains = models.talker.decoder.norm.weight.detach().float()
    hidden = (torch.randn(FRAMES, len(gains), generator=draw) * gains).bfloat16()
    code0 = torch.randint(64, (FRAMES,), generator=draw)
    vocab = models.code_predictor.embedding.shape[1]
    noise = np.stack([noise_of_frame(start, 15, vocab) for start in range(FRAMES)])
    return hidden.float(), code0, torch.from_numpy(noise), top_p_limits([TOP_P] * FRAMES)


@torch.inference_mode()
def float32_codes(folder: Path) -> Codes:
    """Return the codes that float32 gives to the frames."""
    models = talker_models(folder)
    assert models.code_predictor is not None
    return codes_in(models.code_predictor, frame_inputs(models), torch.float32)


@torch.inference_mode()
def codes_in(predictor: CodePredictor, given: tuple[Tensor, ...], arithmetic: torch.dtype) -> Codes:
    """Return the codes that a code predictor gives in an arithmetic."""
    hidden, code0, *random = given
    hidden = hidden.to(arithmetic)
    return predictor(hidden, code0)[0], predictor(hidden, code0, *random)[0]


@torch.inference_mode()
def codes_of_engine(
    predictor: Predictor, given: tuple[Tensor, ...], talker_type: torch.dtype
) -> Codes:
    """Return the codes of an engine's predictor.

    talker_type: type of the hidden states, which the feedback has, too.
    """
    hidden, code0, *_ = given
    tables = hidden.to(talker_type), torch.empty_like(hidden, dtype=talker_type)
    found = []
    for starts in ([None] * FRAMES, range(FRAMES)):
        sampling = [PredictorSampling(start, 50, TOP_P) for start in starts]
        found.append(predictor.predict(range(FRAMES), code0.tolist(), sampling, *tables))
    return found[0], found[1]


def same_frames(ours: Codes, theirs: Codes) -> list[float]:
    """Return the shares of greedy and of sampled frames whose 16 codes are the same."""
    return [float((a == b).all(1).float().mean()) for a, b in zip(ours, theirs, strict=True)]


def predictor_spec(folder: Path, target: str, predictor_dtype: str) -> PartSpec:
    """Describe the code predictor of a plan in bfloat16, with graphs of FRAMES slots."""
    plan = replace(TINY_PLAN, target=target, dtype="bfloat16", predictor_dtype=predictor_dtype)
    plan = replace(plan, batches=(FRAMES,), max_concurrency=FRAMES)
    return part_spec(read_config(folder), plan, "code_predictor")
