"""A checkpoint on disk: config, tensors, parameter names, and the modules filled from it."""

from pathlib import Path

SPEAKING_CHECKPOINT = Path(__file__).parents[1] / "speaking_checkpoint"
"""The checkpoint that ships with the package. Its README.md is its model card."""
