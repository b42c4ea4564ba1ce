"""What engines are built from."""

from dataclasses import dataclass
from pathlib import Path

import torch

from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.model.config import OmniConfig


@dataclass(frozen=True)
class EngineSpec:
    """Small, so that it can be sent to a process of its own.

    newline_id: the token of the line break after a role. compiled: the tree that the graphs, or
    the weights, are taken from; None: the checkpoint's folder.
    """

    plan: CompilePlan
    config: OmniConfig
    newline_id: int
    compiled: Path | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return getattr(torch, self.plan.dtype)
