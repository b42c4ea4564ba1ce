"""Memory of this process, as Linux counts it, and of torch's tensors."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_mb() -> float:
    """The most that this process has had so far, all of its memory."""
    return max(_status_mb("VmHWM"), _status_mb("VmRSS"))  # Linux notes the first a little late


def resident_mb() -> float:
    """What it has now."""
    return _status_mb("VmRSS")


def total_mb() -> float:
    """The machine's."""
    return _kilobytes(Path("/proc/meminfo"), "MemTotal") / 1024


def live_tensor_bytes() -> int:
    """Of all tensors that Python holds, each piece of memory once."""
    gc.collect()
    # type() rather than isinstance(), which asks lazy modules for their class and loads them.
    # Other subclasses stand for tensors that a trace only describes.
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    dense = [x for x in tensors if x.device.type == "cpu" and x.layout == torch.strided]
    on_host = [x.untyped_storage() for x in dense]
    return sum({storage.data_ptr(): storage.nbytes() for storage in on_host}.values())


def peak_tensor_bytes(call: Callable[[], Any]) -> int:
    """The most that a call's tensors have at a time beside those that were there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = call()
    del kept
    changes = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most


def _status_mb(name: str) -> float:
    return _kilobytes(Path("/proc/self/status"), name) / 1024


def _kilobytes(file: Path, name: str) -> int:
    """The number of a line such as "VmHWM:   12345 kB"."""
    return int(file.read_text(encoding="utf-8").split(f"{name}:")[1].split()[0])
