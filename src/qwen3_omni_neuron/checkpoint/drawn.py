"""Random weights that no file holds: each is drawn from its name and a seed when it is read.

A checkpoint of the released size takes 70 GB on a disk. A folder with DRAWN_FILE in place of its
shards takes some kilobytes, and reads as the checkpoint that `tiny-checkpoint` writes from that
seed, bit for bit.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.errors import CheckpointError, format_value
from qwen3_omni_neuron.untrusted_files import read_json, reason

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DRAWN_FILE = "drawn.json"


class DrawnTensors:
    """The tensors of a folder with DRAWN_FILE, by released name.

    Raises CheckpointError if that file or config.json can't be read.
    """

    def __init__(self, folder: Path):
        # Drawing needs torch, and a folder of shards does not need this.
        import torch

        from qwen3_omni_neuron.checkpoint.tiny.weights import parameter_shapes

        read_config(folder)  # checks its sizes
        try:
            seed = read_json(folder / DRAWN_FILE)["seed"]
            self._config = read_json(folder / "config.json")
            self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[
                self._config["dtype"]
            ]
            self.shapes = parameter_shapes(self._config)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder} has a {DRAWN_FILE}, and it or config.json can't be read: "
                f"{reason(error)}. Write it again: qwen3-omni-neuron tiny-checkpoint DIR --drawn."
            ) from error
        if type(seed) is not int or not 0 <= seed < 1 << 63:
            raise CheckpointError(
                f"{folder / DRAWN_FILE} has seed {format_value(seed)}, and not a whole number from "
                "0 to 2^63 - 1."
            )
        self._seed = seed

    def tensor(self, name: str) -> "Tensor":
        """Draw a tensor, in the dtype of config.json."""
        import torch

        from qwen3_omni_neuron.checkpoint.tiny.weights import random_weights

        tensor = torch.empty(self.shapes[name], dtype=self._dtype)
        random_weights(self._seed)(self._config, name, tensor)
        return tensor

    def dtype(self, name: str) -> "torch.dtype":
        """Return the type of a tensor."""
        return self._dtype

    def trim(self) -> None:
        """Do nothing: no file is open."""

    def close(self) -> None:
        """Do nothing: no file is open."""
