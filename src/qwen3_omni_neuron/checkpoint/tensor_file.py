"""Writes safetensors one tensor at a time: safetensors' own writer wants all of them in memory."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int32: "I32",
}
# A file is mapped where it is read, so that its data lies as a tensor of torch's own would.
_ALIGNMENT = 64

Layout = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and type of each tensor of a file by its name, in the file's order. Types: float32,
bfloat16, float64, int32."""


def layout_bytes(layout: Layout) -> int:
    """Of a file's tensors, without its header."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in layout.values())


def write_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write `tensors`, each with its name, in the order of `shapes` and of these shapes, all of
    `dtype`, into a new file. Raises OSError."""
    layout = {name: (shape, dtype) for name, shape in shapes.items()}
    write_tensor_files([path], layout, ((name, [tensor]) for name, tensor in tensors))


def write_tensor_files(
    paths: Sequence[Path], layout: Layout, parts: Iterable[tuple[str, Sequence[Tensor]]]
) -> None:
    """Write several new files of one layout side by side.

    parts: a name, and for each file what it holds of that tensor: all of it, or a part of it along
    its first axis, the others following. Tensors come in the order of the layout. Raises OSError.
    """
    header = _header(layout)
    with ExitStack() as stack:
        files: list[BinaryIO] = [stack.enter_context(path.open("xb")) for path in paths]
        for file in files:
            file.write(header)
        names, held, wanted = iter(layout), 0, 0
        current = ""
        for name, tensors in parts:
            if held == wanted:
                current, held = next(names), 0
                wanted = prod(layout[current][0])
            shape, dtype = layout[current]
            (part,) = {(tensor.shape, tensor.dtype) for tensor in tensors}
            assert (name, tuple(shape[1:]), dtype) == (current, tuple(part[0][1:]), part[1])
            held += part[0].numel()
            assert held <= wanted, f"{name} has {held} values, and was to have {wanted}"
            for file, tensor in zip(files, tensors, strict=True):
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        assert held == wanted and next(names, None) is None, "not all tensors came"


def _header(layout: Layout) -> bytes:
    entries: dict[str, object] = {}
    end = 0
    for name, (shape, dtype) in layout.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
