"""A checkpoint on disk, read into the dataclasses and modules of model/.

config_json reads configs, files finds a checkpoint and reads its tensors, quantised and numbers
know published forms, names maps released names to parameters, parameters and modules fill the
modules of model/, tensor_file writes new files.
"""

from pathlib import Path

SPEAKING_CHECKPOINT = Path(__file__).parents[1] / "speaking_checkpoint"
"""The checkpoint that ships with the package; README.md is its model card."""
