"""Engines over parts on Neuron, in compiled batches, against the same modules on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.cpu.eager import EagerPredictor
from qwen3_omni_neuron.cpu.encoders import CpuAudio, CpuVision
from qwen3_omni_neuron.engines.protocols import Predictor, PredictorSampling
from qwen3_omni_neuron.engines.talker import ROWS_AT_ONCE, TextRows
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.engines import (
    NeuronAudio,
    NeuronPredictor,
    NeuronProjection,
    NeuronVision,
)
from qwen3_omni_neuron.neuron.graphs.all import all_graphs
from testing.eager_neuron import EagerPart, eager_models, eager_spec
from testing.prompts import random_visual

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
GREEDY = PredictorSampling(None, 50, 1.0)


def part_of(checkpoint: Path, config: OmniConfig, name: str) -> EagerPart:
    _, static = eager_models(checkpoint, torch.float32)
    plan = replace(eager_spec(checkpoint).plan, tp=Degrees.same(1))
    graphs = [graph for graph in all_graphs(config, plan) if graph.part == name]
    return EagerPart(getattr(static, name), graphs)


@pytest.fixture(scope="module")
def cpu(models) -> EagerPredictor:
    return EagerPredictor(models.code_predictor)


def predicted(
    predictor: Predictor, hidden: torch.Tensor, code0: torch.Tensor, how: list[PredictorSampling]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and feedback."""
    slots, feedback = range(len(how)), torch.zeros_like(hidden)
    return predictor.predict(slots, code0.tolist(), how, hidden, feedback), feedback


@torch.inference_mode()
def test_frames_sampled_each_in_its_own_way_are_the_cpus(checkpoint, config, cpu) -> None:
    for how in (
        [GREEDY],
        [PredictorSampling(1, 50, 0.8)],
        [PredictorSampling(1, 50, 0.8), PredictorSampling(2, 3, 1.0)],
        [GREEDY, PredictorSampling(3, 50, 0.5), GREEDY],
        [PredictorSampling(4, 1, 0.5), PredictorSampling(5, 3, 1.0), PredictorSampling(6, 50, 0.1)],
    ):
        neuron = NeuronPredictor(part_of(checkpoint, config, "code_predictor"), 64, None)
        generator = torch.Generator().manual_seed(len(how))
        hidden = torch.randn(len(how), config.talker.text.hidden_size, generator=generator)
        code0 = torch.randint(0, 64, (len(how),), generator=generator)
        codes, feedback = predicted(neuron, hidden, code0, how)
        for row in range(len(how)):  # the CPU's, alone and together
            one = slice(row, row + 1)
            expected = predicted(cpu, hidden[one], code0[one], how[one])
            torch.testing.assert_close((codes[one], feedback[one]), expected, **CLOSE)
        torch.testing.assert_close((codes, feedback), predicted(cpu, hidden, code0, how), **CLOSE)


def test_a_top_k_above_the_compiled_one_is_refused_before_any_call(checkpoint, config) -> None:
    part = part_of(checkpoint, config, "code_predictor")
    neuron, hidden = NeuronPredictor(part, 64, None), torch.zeros(2, config.talker.text.hidden_size)
    with pytest.raises(BucketError, match=r"is 60, .* at most 50 codes"):
        predicted(neuron, hidden, torch.zeros(2).long(), [GREEDY, PredictorSampling(1, 60, 1.0)])
    assert not part.called
    # Fewer codes than were compiled: no limit is one that fits.
    few = NeuronPredictor(part, 40, None)
    for top_k in (0, 60):
        predicted(few, hidden[:1], torch.zeros(1).long(), [PredictorSampling(1, top_k, 1.0)])


def test_the_table_of_text_rows_is_the_projection_of_every_token(
    checkpoint, config, models
) -> None:
    """More rows than are projected at once, and no multiple of any batch."""
    part = part_of(checkpoint, config, "text_projection")
    vocabulary = models.embedding.weight.detach().repeat(20, 1)[: ROWS_AT_ONCE + 101]
    assert len(vocabulary) == ROWS_AT_ONCE + 101
    project, width = NeuronProjection(part, "text_projection"), config.talker.text.hidden_size
    text_rows = TextRows(vocabulary, project, width, torch.float32).fill()
    expected = models.text_projection(vocabulary)
    torch.testing.assert_close(text_rows(torch.arange(len(vocabulary))), expected, **CLOSE)


@torch.inference_mode()
def test_clips_of_any_length_are_encoded_as_on_the_cpu(checkpoint, config, models) -> None:
    """One window to seven, at the width of a clip shorter than a second too."""
    for seconds in ((0.35,), (8.0,), (30.0, 8.1), (0.4, 0.7), (37.0, 3.0)):
        part, c = part_of(checkpoint, config, "audio_encoder"), config.thinker.audio
        clips = [torch.randn(c.mel_bins, int(100 * s)) for s in seconds]
        expected = CpuAudio(models.audio_encoder).encode(clips)
        torch.testing.assert_close(NeuronAudio(part, c).encode(clips), expected, **CLOSE)


@torch.inference_mode()
def test_pictures_are_encoded_in_the_least_bucket_as_on_the_cpu(checkpoint, config, models) -> None:
    part, c = part_of(checkpoint, config, "vision_encoder"), config.thinker.vision
    pictures = [
        random_visual(checkpoint, grid) for grid in ((1, 4, 4), (3, 4, 6), (1, 2, 2), (1, 8, 8))
    ]
    vision = NeuronVision(part, c)
    expected = CpuVision(models.vision_encoder).encode(pictures)
    torch.testing.assert_close(vision.encode(pictures), expected, **CLOSE)
    assert [label.split("=")[1] for label in part.called] == ["16]", *["64]"] * 3, "16]", "64]"]
    large = random_visual(checkpoint, (1, 12, 22))
    with pytest.raises(BucketError, match=r"264 patches in a frame, but .* has 256"):
        vision.encode([large])
