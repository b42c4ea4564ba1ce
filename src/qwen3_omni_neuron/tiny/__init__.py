"""Tiny checkpoints in the released layout with random weights, for tests, demos and benchmarks.

write: the whole checkpoint. shapes: its config.json. tokenizer: its tokenizer and preprocessor
files. weights: its parameters.
"""

from qwen3_omni_neuron.tiny.write import write_tiny_checkpoint

__all__ = ["write_tiny_checkpoint"]
