"""Write safetensors files one tensor at a time, and map them into memory.

The safetensors package writes only from memory, and its reader reads a page of each tensor.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from qwen3_omni_neuron.checkpoint.headers import read_headers

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
# As torch aligns its own tensors.
_ALIGNMENT = 64

Layout = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of a file's tensors by name, in the file's order.

Supported: float32, bfloat16, float64, int32, int8 and uint8.
"""
_NOTHING: Layout = MappingProxyType({})


def layout_bytes(layout: Layout) -> int:
    """Return the bytes of a file's tensors, without its header."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in layout.values())


def write_tensors(
    path: Path, layout: Layout, tensors: Iterable[tuple[str, Tensor]], instead: Layout = _NOTHING
) -> None:
    """Write a new file of tensors in the layout's order. instead: see write_tensor_files.

    Raises OSError.
    """
    parts = ((name, [tensor]) for name, tensor in tensors)
    write_tensor_files([path], layout, parts, instead)


def write_tensor_files(
    paths: Sequence[Path],
    layout: Layout,
    parts: Iterable[tuple[str, Sequence[Tensor]]],
    instead: Layout = _NOTHING,
) -> None:
    """Write several new files of one layout side by side. Raises OSError.

    parts: a tensor's name, in the layout's order, and its next data for each file: the whole
    tensor, or the next slice along its first axis. instead: alternative shapes and dtypes of some
    tensors; the header, written last, has the actual ones.
    """
    # No mixture is longer: one of the two has all the longer entries.
    reserved = max(len(_header(layout)), len(_header({**layout, **instead})))
    came: dict[str, tuple[Sequence[int], torch.dtype]] = {}
    with ExitStack() as stack:
        files: list[BinaryIO] = [stack.enter_context(path.open("xb")) for path in paths]
        for file in files:
            file.write(bytes(reserved))
        names, current = iter(layout), ""
        written, expected = 0, 0  # values of the current tensor
        for name, tensors in parts:
            ((part_shape, part_dtype),) = {(tensor.shape, tensor.dtype) for tensor in tensors}
            if written == expected:
                current, written = next(names), 0
                other = part_dtype != layout[current][1] and current in instead
                came[current] = (instead if other else layout)[current]
                expected = prod(came[current][0])
            shape, dtype = came[current]
            assert (name, dtype) == (current, part_dtype)
            assert tuple(part_shape[1:]) == tuple(shape[1:])
            written += part_shape.numel()
            assert written <= expected, f"{name} has {written} values instead of {expected}"
            for file, tensor in zip(files, tensors, strict=True):
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        assert written == expected and next(names, None) is None, "not all tensors came"
        header = _header(came, reserved)
        assert len(header) == reserved
        for file in files:
            file.seek(0)
            file.write(header)


def _header(layout: Layout, least_bytes: int = 0) -> bytes:
    """Return a file's header, padded to an aligned size of at least `least_bytes`."""
    entries: dict[str, object] = {}
    end = 0
    for name, (shape, dtype) in layout.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = max(8 + len(text), least_bytes)
    text = text.ljust(size + -size % _ALIGNMENT - 8)
    return len(text).to_bytes(8, "little") + text


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Map a file. Returns its tensors by name, without reading a page.

    Raises OSError, SafetensorError for a broken file, and ValueError for an unknown type.
    """
    with safe_open(path, framework="pt"):
        pass  # safetensors checks the header against the file's size
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
    found = {}
    for name, stored in read_headers(path.parent, [path.name]).items():
        if stored.dtype not in _DTYPES:
            raise ValueError(f"{name} is of type {stored.dtype}")
        values = torch.empty(0, dtype=_DTYPES[stored.dtype])
        found[name] = values.set_(storage[stored.begin : stored.end]).view(stored.shape)
    return found
