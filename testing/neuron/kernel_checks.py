"""NxDI's attention kernel up to its first instruction: the checks of what it is called with.

Set NKILIB_SOURCES to the `src/nkilib_src` folder of a checkout of aws-neuron/nki-library. Kernels
need the Neuron SDK; the checks that they begin with are plain Python over shapes.
"""

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from testing.neuron.closed_wheels import KERNELS

VARIABLE = "NKILIB_SOURCES"
_NAME = "kernel_library"  # under its own name, nkilib, NxDI imports stand-ins
# Names that the module reads while it is imported: the kernel itself, undecorated, is plain Python.
_IMPORTED = {
    "nki.jit": lambda function: function,
    "nki.language.NKIObject": object,
    "nki.language.float32": torch.float32,
}
_TRN2 = 3  # generation of the core


class AttentionChecks:
    """Stand-in for the kernel in NxDI, called as `kernel(...)` or `kernel[cores](...)`.

    A call returns an output on the meta device, or raises the kernel's AssertionError. sizes: of
    each call so far, the physical cores and the rows of the prompt.
    Raises FileNotFoundError, which says what to set, without the sources.
    """

    def __init__(self) -> None:
        folder = Path(os.environ.get(VARIABLE, "")) / "nkilib" / "core"
        if not (folder / "attention").is_dir():
            raise FileNotFoundError(
                f"no kernel library: set {VARIABLE} to src/nkilib_src of aws-neuron/nki-library"
            )
        self._kernel = _attention_module(folder)
        self.sizes: list[tuple[int, int]] = []

    def __getitem__(self, cores: int) -> Any:
        return partial(self._call, cores)

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        return self._call(1, *args, **options)

    def _call(self, cores: int, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        output = None
        for core in range(cores):
            with mock.patch.multiple(
                self._kernel,
                get_verified_program_sharding_info=lambda *_, core=core, **__: (1, cores, core),
                _attention_cte_impl=self._check_tiles,
            ):
                output = self._kernel.attention_cte(q, k, v, *args, **options)
        self.sizes.append((cores, v.shape[1]))
        return output

    def _check_tiles(self, *args: Any, shard_seqlen_q_start: int = -1, **_options: Any) -> None:
        (config,) = (arg for arg in args if isinstance(arg, self._kernel.AttnConfig))
        self._kernel._compute_tile_parameters(config, shard_seqlen_q_start >= 0)


def _attention_module(folder: Path) -> ModuleType:
    """Import the kernel's module without its package's __init__, which looks for the SDK."""
    for name in ("", ".utils", ".attention"):
        package = ModuleType(_NAME + name)
        package.__path__ = [str(folder / name.removeprefix("."))]
        sys.modules[_NAME + name] = package
    with mock.patch.dict(KERNELS, _IMPORTED):
        module = importlib.import_module(f"{_NAME}.attention.attention_cte")
    module.__dict__.update(
        nl=SimpleNamespace(
            ndarray=lambda shape, dtype, buffer: torch.empty(shape, dtype=dtype, device="meta"),
            shared_hbm=None,
            float32=torch.float32,
            bfloat16=torch.bfloat16,
            tile_size=SimpleNamespace(pmax=128),
        ),
        nisa=SimpleNamespace(
            get_nc_version=lambda: _TRN2, nc_version=SimpleNamespace(gen4=_TRN2 + 1)
        ),
    )
    return module
