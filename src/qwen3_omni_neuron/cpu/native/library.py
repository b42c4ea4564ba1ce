"""The compiled library, and what its calls take."""

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

NO_MEMORY, NO_SUCH_CODE = 1, 2  # as in status.h

Number, Pointer = ctypes.c_int64, ctypes.c_void_p


class UnsuitedError(ValueError):
    """These weights are not what the C takes; torch's operations take them."""


@cache
def find_library() -> ctypes.CDLL | None:
    """What the installation compiled; None where it could not."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_library{suffix}")
        if path.exists():
            library = ctypes.CDLL(str(path))  # its calls let other threads of Python run
            library.decode_step.argtypes = [Pointer, Number, *[Pointer] * 6]
            library.prefill.argtypes = [Pointer, Number, *[Pointer] * 4, Number, *[Pointer] * 3]
            library.predict_frame.argtypes = [
                Pointer, Number, *[Pointer] * 4, Number, *[Pointer] * 3
            ]  # fmt: skip
            library.run_wave.argtypes = [
                Pointer, Number, Pointer, Number, ctypes.c_int, Pointer, Pointer
            ]  # fmt: skip
            library.wave_state_size.restype = Number
            return library
    return None


class Weights:
    """Pointers to weights, which it keeps from being freed."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def __call__(self, weight: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        """Raises UnsuitedError for a weight of another type, shape or layout."""
        weight = weight.detach()
        try:
            pointer = pointer_to(weight, dtype, *shape)
        except ValueError as wrong:
            raise UnsuitedError(str(wrong)) from None
        self._held.append(weight)
        return pointer


def pointer_to(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Where a dense tensor of this type and shape begins. Raises ValueError for any other."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"the C takes {dtype} {list(shape)} on the CPU here, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"the C takes dense tensors, got strides {tensor.stride()}")
    return tensor.data_ptr()


def check(status: int) -> None:
    """Raises MemoryError where a call found none."""
    if status == NO_MEMORY:
        raise MemoryError("no memory for the rows of a decode step")
