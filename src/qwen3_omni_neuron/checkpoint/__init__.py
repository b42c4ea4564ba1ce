"""Checkpoints on disk, read into the dataclasses and modules of model/.

files finds and reads tensors; quantised and numbers know published forms; names maps released names
to parameters; parameters and modules fill them.
"""

from pathlib import Path

SPEAKING_CHECKPOINT = Path(__file__).parents[1] / "speaking_checkpoint"
"""The checkpoint that ships with the package; README.md is its model card."""
