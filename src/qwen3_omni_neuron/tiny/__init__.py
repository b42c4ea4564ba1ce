"""Tiny checkpoints in the released layout, with random weights: for tests, demos and benchmarks."""

from qwen3_omni_neuron.tiny.write import write_tiny_checkpoint

__all__ = ["write_tiny_checkpoint"]
