"""Tiny checkpoints and the models over them, made once a run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint import Checkpoint
from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.config_json import read_config
from qwen3_omni_neuron.cpu.load import Models, load_models
from qwen3_omni_neuron.tiny import write_tiny_checkpoint
from reference import Reference

QUESTION_WAV = Path(__file__).parent.parent / "examples" / "question.wav"
CheckpointMaker = Callable[[int], Path]


@pytest.fixture(scope="session")
def checkpoint_of_seed(tmp_path_factory: pytest.TempPathFactory) -> CheckpointMaker:
    """A tiny checkpoint by its seed."""
    made: dict[int, Path] = {}

    def make(seed: int) -> Path:
        if seed not in made:
            made[seed] = write_tiny_checkpoint(tmp_path_factory.mktemp(f"seed{seed}"), seed)
        return made[seed]

    return make


@pytest.fixture(scope="session")
def checkpoint(checkpoint_of_seed: CheckpointMaker) -> Path:
    return checkpoint_of_seed(1)


@pytest.fixture(scope="session")
def config(checkpoint: Path) -> OmniConfig:
    return read_config(checkpoint)


@pytest.fixture(scope="session")
def models(checkpoint: Path, config: OmniConfig) -> Models:
    """Our modules in float32."""
    return load_models(Checkpoint(checkpoint), config, torch.float32, context_length=512)


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    """The oracle in float32."""
    return Reference(checkpoint)


@pytest.fixture(scope="session")
def omni(checkpoint: Path) -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=3) as loaded:
        yield loaded
