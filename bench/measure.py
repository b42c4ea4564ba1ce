"""What the benchmarks share: a stopwatch, and what they ran on."""

import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers


def timed(function: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def environment() -> dict[str, Any]:
    """Versions and machine, for a figure to be compared with others."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
