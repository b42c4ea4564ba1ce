"""Memory of this process, as Linux counts it in MiB, and of torch's tensors; its open files."""

import ctypes
import gc
import resource
from pathlib import Path


def peak_mb() -> float:
    """Return the peak of this process's memory so far."""
    return max(_status_mb("VmHWM"), _status_mb("VmRSS"))  # VmHWM is updated a little late


def resident_mb() -> float:
    """Return this process's memory now."""
    return _status_mb("VmRSS")


def total_mb() -> float:
    """Return the machine's memory."""
    return _kilobytes(Path("/proc/meminfo"), "MemTotal") / 1024


def allocated_mb() -> float | None:
    """Return the memory that malloc has allocated and not freed; None without glibc's malloc."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _MallocInfo
    sizes = mallinfo().sizes
    return (sizes[4] + sizes[7]) / 2**20  # hblkhd, uordblks


def major_faults() -> int:
    """Return how often this process has waited for a page from the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def open_files() -> int:
    """Return the number of this process's open files and sockets."""
    return len(list(Path("/proc/self/fd").iterdir()))


def live_tensor_bytes() -> int:
    """Return the bytes of all tensors that Python holds, each piece of memory once."""
    import torch  # here, because a process without torch must not load it

    gc.collect()
    # type() rather than isinstance(), which asks lazy modules for their class and loads them. Other
    # subclasses are tensors of a trace, which have no memory.
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    dense = [x for x in tensors if x.device.type == "cpu" and x.layout == torch.strided]
    on_host = [x.untyped_storage() for x in dense]
    return sum({storage.data_ptr(): storage.nbytes() for storage in on_host}.values())


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def _status_mb(name: str) -> float:
    return _kilobytes(Path("/proc/self/status"), name) / 1024


def _kilobytes(file: Path, name: str) -> int:
    """Return the number of a line such as "VmHWM:   12345 kB"."""
    return int(file.read_text(encoding="utf-8").split(f"{name}:")[1].split()[0])
