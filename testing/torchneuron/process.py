"""The settings of TorchNeuron in this process, and the stand-in in torch.compile's table."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qwen3_omni_neuron.neuron.torchneuron.environment import SETTINGS
from testing.torchneuron.backend import register


@contextmanager
def standing_in() -> Iterator[None]:
    """Register `backend="neuron"`, with TorchNeuron's settings, until the block ends."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    register()
    try:
        yield
    finally:
        torch.compiler.reset()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
