"""Random weights without files: each is drawn from its name and a seed when read.

DRAWN_FILE takes some megabytes instead of 70 GB of shards at the released size, and reads as the
same checkpoint, bit for bit.
"""

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DRAWN_FILE = "drawn.json"
"""{"dtype", "seed", "tensors": {name: [shape, mean, deviation, end_row]}}; see `draw`."""
EOS_SCALE = 0.2
"""Scale of a head's end-of-reply row; 1: random replies are about as long as the vocabulary."""
BLOCK_VALUES = 2**24  # drawn at a time: a released table takes 1.2 GB in float32


def draw(
    tensor: "Tensor", name: str, seed: int, mean: float, deviation: float, end_row: int | None
) -> None:
    """Fill a parameter from a seed, independently of the others.

    end_row: a head's row for the token that ends a reply.
    """
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed * 0x9E3779B1)
    start = 0
    for block in tensor.split(max(1, BLOCK_VALUES // tensor[0].numel())):
        values = torch.randn(block.shape, generator=generator).mul_(deviation)
        if mean:
            values += mean
        if end_row is not None and start <= end_row < start + len(block):
            values[end_row - start] *= EOS_SCALE
        block.copy_(values)
        start += len(block)


class DrawnTensors:
    """The tensors of a folder with DRAWN_FILE, by released name. Raises CheckpointError."""

    def __init__(self, folder: Path):
        import torch  # a folder of shards does not need it here

        try:
            drawn = json.loads((folder / DRAWN_FILE).read_text(encoding="utf-8"))
            self._dtype: torch.dtype = getattr(torch, drawn["dtype"])
            self._seed, self._tensors = drawn["seed"], drawn["tensors"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder / DRAWN_FILE} can't be read ({error!r}). Write it again."
            ) from error
        self.shapes = {name: tuple(drawn[0]) for name, drawn in self._tensors.items()}

    def tensor(self, name: str) -> "Tensor":
        """Draw a tensor."""
        import torch

        shape, mean, deviation, end_row = self._tensors[name]
        tensor = torch.empty(shape, dtype=self._dtype)
        draw(tensor, name, self._seed, mean, deviation, end_row)
        return tensor

    def dtype(self, name: str) -> "torch.dtype":
        """Return the type of a tensor."""
        return self._dtype

    def trim(self) -> None:
        """Do nothing: no file is open."""

    def close(self) -> None:
        """Do nothing: no file is open."""
