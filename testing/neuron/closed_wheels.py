"""Stand-ins for the packages that NxD and NxDI import and that come only with the Neuron SDK.

NxD's and NxDI's public sources need these for their own CPU mode: the names that they read while
they are imported, the few operators that their CPU path calls, and for ModelBuilder (V2) those of
testing/neuron/eager_part_device.py. Anything else that would compile for a device, or run on one,
raises NeuronOnlyError when it is called; no class of NxD or NxDI is changed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from testing.neuron import eager_part_device

# Any module under these can be imported, and any name taken from it.
KERNEL_PACKAGES = ("neuronxcc", "nki", "nkilib", "islpy")


class NeuronOnlyError(RuntimeError):
    """Something that needs the Neuron SDK was called."""


class NeuronOnly:
    """A name that can be imported, subscripted and joined by |, but not called.

    Neither `kernel(...)` nor `kernel[grid](...)` works.
    """

    def __init__(self, name: str):
        self._name = name

    def __getitem__(self, grid: object) -> "NeuronOnly":
        return self

    def __or__(self, other: object) -> "NeuronOnly":
        return self

    def __getattr__(self, attribute: str) -> "NeuronOnly":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return NeuronOnly(f"{self._name}.{attribute}")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise NeuronOnlyError(f"{self._name} needs the Neuron SDK; the tests have its CPU mode")


class Launched:
    """A kernel with a known result: `kernel[grid](...)`, which does not depend on the grid."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        return self._function


def decorator(name: str) -> Callable[..., Any]:
    """Stand in for nki.jit and the like, with or without options; the result can't be called."""

    def decorate(*args: Any, **_options: object) -> Any:
        if args and (callable(args[0]) or isinstance(args[0], NeuronOnly)):
            return NeuronOnly(f"{name}({getattr(args[0], '__qualname__', args[0])})")
        return lambda function: NeuronOnly(f"{name}({getattr(function, '__qualname__', function)})")

    return decorate


def empty_class(name: str) -> type:
    """Make a class for annotations and isinstance."""
    return type(name, (), {})


def operator(function: Callable[..., Any]) -> SimpleNamespace:
    """Make an autograd function of its `apply`."""
    return SimpleNamespace(apply=function)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dim: int = -1) -> Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + eps)
    return (unit * weight).to(x.dtype)


def names(module: str, listed: str) -> dict[str, Any]:
    return {name: NeuronOnly(f"{module}.{name}") for name in listed.split()}


def trn2(*_args: object, **_kwargs: object) -> str:
    return "trn2"


XLA_IMPL = "torch_neuronx.xla_impl"
MODULES: dict[str, dict[str, Any]] = {
    "torch_neuronx": {
        "BucketModelConfig": empty_class("BucketModelConfig"),
        "__version__": "2.9.0",  # the version that ModelBuilder checks
        "contexts": SimpleNamespace(disable_nrt_load=nullcontext),
    },
    "torch_neuronx.proto": {"metaneff_pb2": eager_part_device.METANEFF},
    "torch_neuronx.pyhlo": names("torch_neuronx.pyhlo", "hlo_pb2 xla_data_pb2"),
    "torch_neuronx.utils": {"get_platform_target": trn2},
    "torch_neuronx.utils.utils": {
        "get_platform_target": trn2,
        "SUPPORTED_TYPES": ("trn1", "trn2", "trn3"),
    },
    "torch_neuronx.testing": {
        "assert_close": torch.testing.assert_close,
        **names("torch_neuronx.testing", "neuron_allclose"),
    },
    "torch_neuronx.testing.validation": names(
        "torch_neuronx.testing.validation",
        "custom_allclose logit_validation neuron_allclose AllCloseSummary",
    ),
    "torch_neuronx.experimental": {},
    "torch_neuronx.experimental.profiler": {},
    "torch_neuronx.experimental.profiler.v2_x": {},
    "torch_neuronx.experimental.profiler.v2_x.custom_op_name": names(
        "torch_neuronx.experimental.profiler.v2_x.custom_op_name", "hlo_debug"
    ),
    XLA_IMPL: {"structure": eager_part_device.STRUCTURE},
    f"{XLA_IMPL}.base": {name: decorator(name) for name in ("xla_call", "xla_hlo_call")},
    f"{XLA_IMPL}.bucket_trace": names(f"{XLA_IMPL}.bucket_trace", "create_bucket_model"),
    f"{XLA_IMPL}.custom_call_targets": names(
        f"{XLA_IMPL}.custom_call_targets",
        "AwsNeuronModuleMarkerStartForward AwsNeuronModuleMarkerEndForward",
    ),
    f"{XLA_IMPL}.ops": {
        "RmsNorm": operator(rms_norm),
        "Argmax": operator(lambda x, dim, keepdim=False: torch.argmax(x, dim, keepdim)),
        "TopK": operator(lambda x, k, dim=-1: torch.topk(x, k, dim)),
        "Softmax": operator(torch.softmax),
        "nki_jit": decorator("nki_jit"),
        "xla_hlo_call": decorator("xla_hlo_call"),
        **names(f"{XLA_IMPL}.ops", "ConcatenateOp"),
    },
    f"{XLA_IMPL}.torchscript": names(f"{XLA_IMPL}.torchscript", "replace_weights"),
    f"{XLA_IMPL}.trace": {
        "HloArtifacts": empty_class("HloArtifacts"),
        "NeffArtifacts": namedtuple("NeffArtifacts", ("neff_filename",)),
        "XLA_DTYPE_TO_METANEFF_DTYPE": {},
        "generate_hlo": eager_part_device.generate_hlo,
        "get_torch_dtype": eager_part_device.torch_dtype,
        **names(
            f"{XLA_IMPL}.trace",
            "generate_neff hlo_compile setup_compiler_dirs "
            "get_hlo_computation_by_id get_hlo_root_instruction hlo_entry_computation",
        ),
    },
    "libneuronxla": {
        "neuron_xla_compile": eager_part_device.neuron_xla_compile,
        **names("libneuronxla", "neuron_xla_wlo_compile"),
    },
    "torch_xla": {  # read by NxD's builder: whether a trace names its operations
        "_XLAC": SimpleNamespace(_get_ir_debug=lambda: False, _set_ir_debug=lambda _on: None)
    },
    "torch_xla.core": {},
    "torch_xla.core.xla_env_vars": {"HOST_WORLD_SIZE": "HOST_WORLD_SIZE"},
    "torch_xla.core.xla_model": {
        "REDUCE_SUM": "sum",
        "REDUCE_MAX": "max",
        "REDUCE_MIN": "min",
        "mark_step": lambda *_args, **_kwargs: None,
        **names(
            "torch_xla.core.xla_model",
            "all_gather all_reduce reduce_scatter all_to_all xla_device rendezvous",
        ),
    },
    "torch_xla.runtime": names(
        "torch_xla.runtime", "global_ordinal world_size local_process_count"
    ),
    "torch_xla.distributed": {},
    "torch_xla.distributed.parallel_loader": {"MpDeviceLoader": empty_class("MpDeviceLoader")},
    "torch_xla.distributed.xla_multiprocessing": names(
        "torch_xla.distributed.xla_multiprocessing", "spawn"
    ),
    "torch_xla.distributed.zero_redundancy_optimizer": {
        "ZeroRedundancyOptimizer": empty_class("ZeroRedundancyOptimizer")
    },
    "torch_xla.utils": {},
    "torch_xla.utils.checkpoint": names("torch_xla.utils.checkpoint", "checkpoint"),
    "torch_xla.utils.serialization": names("torch_xla.utils.serialization", "save load"),
    "torch_xla.utils.utils": names("torch_xla.utils.utils", "get_free_tcp_ports getenv_as"),
}
# Names of the kernel packages that the CPU path calls, or reads while it is imported.
KERNELS: dict[str, Any] = {
    "nki.jit": decorator("nki.jit"),
    "neuronxcc.nki.jit": decorator("neuronxcc.nki.jit"),
    "nkilib.core.max.cascaded_max.cascaded_max": Launched(
        lambda x: torch.max(x, dim=-1, keepdim=True)
    ),
    "nkilib.core.topk.topk": Launched(lambda x, k, sorted_flag=True: torch.topk(x, k, dim=-1)),
    "nkilib.core.moe.moe_cte.moe_cte_utils.SkipMode": namedtuple(
        "SkipMode", ("skip_token", "skip_weight")
    ),
    "nkilib.core.cumsum.cumsum.cumsum": lambda x, axis: torch.cumsum(x, dim=axis),
    "neuronxcc.nki._pre_prod_kernels.collectives.CollectivesConfig": lambda replica_groups: (
        SimpleNamespace(rank_src_tgt_pairs={rank: [] for group in replica_groups for rank in group})
    ),
}


class KernelModule(ModuleType):
    """A module of a kernel package: any name can be taken from it."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        name = f"{self.__name__}.{attribute}"
        if name in sys.modules:
            return sys.modules[name]
        return KERNELS.get(name) or NeuronOnly(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of the stand-ins for packages that are not installed."""

    def __init__(self, absent: Sequence[str]):
        self._absent = absent

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        root = fullname.split(".", maxsplit=1)[0]
        if root not in self._absent or (root not in KERNEL_PACKAGES and fullname not in MODULES):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name not in MODULES:
            return KernelModule(spec.name)
        module = ModuleType(spec.name)
        module.__dict__.update(MODULES[spec.name], __path__=[])
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a module is complete when it is created."""


def install() -> None:
    """Stand in for each package that is not installed, and choose NxD's CPU mode.

    It must run once in a process, before any Neuron package is imported.
    """
    os.environ["NXD_CPU_MODE"] = "1"
    roots = {name.split(".")[0] for name in MODULES} | set(KERNEL_PACKAGES)
    absent = [root for root in sorted(roots) if importlib.util.find_spec(root) is None]
    sys.meta_path.insert(0, Finder(absent))
    if "torch_neuronx" in absent:
        eager_part_device.install()
