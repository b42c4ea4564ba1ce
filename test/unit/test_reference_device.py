"""A reference on a GPU, shown without one."""

import re

import pytest
import torch

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.verification.write import computing_on


def test_a_gpu_computes_without_tf32() -> None:
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    for backend in backends:
        backend.allow_tf32 = True
    with computing_on("cpu"):
        assert not any(backend.allow_tf32 for backend in backends)
    with torch.backends.cudnn.flags(enabled=False):  # as torch.export does, which reads the rest
        pass


def test_errors_of_a_gpu_are_named(monkeypatch) -> None:
    with pytest.raises(OptionError, match=r"--device gpu can't be used: .* string: gpu"):
        computing_on("gpu").__enter__()
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # as if torch had one
    for error in (
        torch.OutOfMemoryError("Tried to allocate 5.02 GiB.\nSee the documentation."),
        AssertionError("Torch not compiled with CUDA enabled"),
        ValueError("Using a `device_map` requires `accelerate`."),
    ):
        first = str(error).splitlines()[0]
        expected = f"--device cuda can't be used: {re.escape(first)} Pass a GPU"
        with pytest.raises(OptionError, match=expected), computing_on("cuda"):
            raise error
        with pytest.raises(type(error)), computing_on("cpu"):
            raise error
