"""Writes safetensors one tensor at a time: safetensors' own writer wants all of them in memory."""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}
# A file is mapped where it is read, so that its data lies as a tensor of torch's own would.
_ALIGNMENT = 64


def write_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write `tensors`, each with its name, in the order of `shapes` and of these shapes, all of
    `dtype` (float32, bfloat16 or float64), into a new file. Raises OSError."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            assert (given, tuple(shape), dtype) == (name, tuple(tensor.shape), tensor.dtype)
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
