"""Writes safetensors one tensor at a time: safetensors' own writer wants all of them in memory."""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import TracebackType

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

Announced = tuple[Sequence[int], torch.dtype]
"""Shape and type of a tensor to come."""


class TensorWriter:
    """A new file whose tensors were announced and come one at a time, in that order.

    A context manager, so that several files may be written side by side. Raises OSError.
    """

    def __init__(self, path: Path, announced: Mapping[str, Announced]):
        """announced: by name; float32, bfloat16, float64 or int32."""
        header: dict[str, object] = {}
        end = 0
        for name, (shape, dtype) in announced.items():
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _CODES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._announced = iter(announced.items())
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little"))
        self._file.write(text)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if kind is None:
            left = [name for name, _ in self._announced]
            assert not left, f"announced and not written: {left}"

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor."""
        wanted, (shape, dtype) = next(self._announced, ("", ((), None)))
        assert (name, tuple(tensor.shape), tensor.dtype) == (wanted, tuple(shape), dtype)
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write `tensors`, each with its name, in the order of `shapes` and of these shapes, all of
    `dtype` (float32, bfloat16 or float64), into a new file. Raises OSError."""
    with TensorWriter(path, {name: (shape, dtype) for name, shape in shapes.items()}) as file:
        for name, tensor in tensors:
            file.write(name, tensor)
