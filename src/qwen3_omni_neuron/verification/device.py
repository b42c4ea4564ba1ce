"""The device on which transformers computes a reference: the CPU, or one GPU."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from qwen3_omni_neuron.errors import NotInstalledError, OptionError, format_value


@contextmanager
def computing_on(device: str) -> Iterator[None]:
    """Check that transformers can compute on a device, and let it multiply float32 in float32.

    By default a GPU's convolutions round their inputs to TF32: a row of code2wav then differs by
    3.7e-4, and verify allows 2.4e-5 in float32. The settings are the process's, and are put back.
    device: "cpu", "cuda" or "cuda:N".
    Raises OptionError where torch has no such device, and where the block runs out of its memory;
    NotInstalledError.
    """
    if device == "cpu":
        yield
        return
    _check(device)
    backends: Any = torch.backends
    parts = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [part.fp32_precision for part in parts]
    for part in parts:
        part.fp32_precision = "ieee"
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OptionError(
            f"--device {device} has too little memory: {str(error).partition(' If ')[0]} bfloat16 "
            "takes half as much as float32; or name a GPU with more memory, or --device cpu."
        ) from error
    finally:
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision


def _check(device: str) -> None:
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise OptionError(
            f"--device takes cpu, or one GPU such as cuda or cuda:1, got {format_value(device)}."
        )
    number, count = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if not torch.cuda.is_available() or number >= count:
        raise OptionError(
            f"torch {torch.__version__} has no --device {device}: it finds {count} GPUs. Compare "
            "with what nvidia-smi lists, install a torch that is built for CUDA "
            "(https://pytorch.org/get-started), or give --device cpu."
        )
    if find_spec("accelerate") is None:
        raise NotInstalledError(
            f"--device {device} needs accelerate, with which transformers loads a model to a GPU. "
            "Install it: pip install accelerate"
        )
