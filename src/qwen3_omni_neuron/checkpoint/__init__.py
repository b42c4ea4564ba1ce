"""A checkpoint on disk, read into the dataclasses and modules of model/.

config_json: config.json and generation_config.json -> model.config.
files: find a checkpoint, and read its tensors by their released names.
headers: types, shapes and places of a file's tensors, without their values.
quantised: the published form of each quantised matrix.
numbers: read quantised matrices, as numbers or as weights.
names: the released name of every parameter, and which parameter of a module it goes to.
parameters: read stored tensors, convert them, and make them the parameters of a module.
released: config.json of the released checkpoints, without the hub.
modules: the modules of model/ that a checkpoint fills, for all stages or some.
tensor_file: write new safetensors files, one tensor at a time.
"""

from pathlib import Path

SPEAKING_CHECKPOINT = Path(__file__).parents[1] / "speaking_checkpoint"
"""The checkpoint that ships with the package. Its README.md is its model card."""
