"""Tiny checkpoints in the released layout with random weights, for tests, demos and benchmarks.

write: the whole checkpoint. sizes: its config.json. tokenizer: its tokenizer and preprocessor
files. weights: its parameters. data: files that are the same in all of them, and the table of
sizes.
"""

from testing.tiny.write import write_tiny_checkpoint

__all__ = ["write_tiny_checkpoint"]
