"""NxDI for test/neuron: its public sources, with stand-ins for the closed packages.

Set NXDI_SOURCES to the `src` folders of checkouts of aws-neuron/neuronx-distributed-inference and
aws-neuron/neuronx-distributed, separated as in PATH, and install tenacity and boto3, which they
import; then `make test-nxdi`. Where both packages are installed the variable isn't needed. Without
NxDI the tests that need it are skipped, with the reason.
"""

import importlib.util
import os
import sys
from typing import Any

from testing.neuron import closed_wheels

VARIABLE = "NXDI_SOURCES"
PACKAGES = ("neuronx_distributed_inference", "neuronx_distributed")


def make_importable() -> str | None:
    """Return None if NxDI can be imported after this call, else the reason why it can't."""
    sys.path.extend(filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)))
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        return (
            f"no {' and no '.join(absent)} here: set {VARIABLE} to the src folders of aws-neuron/"
            "neuronx-distributed-inference and aws-neuron/neuronx-distributed"
        )
    closed_wheels.install()
    try:
        importlib.import_module("neuronx_distributed_inference.models.model_base")
    except ImportError as error:  # a package that NxDI needs, or another transformers
        return f"NxDI can't be imported here: {error}"
    return None


def join_ranks(tp: int) -> None:
    """Make this process one of `tp` ranks; for tp above 1, torchrun must have started it.

    Decoders of one process share the ranks. Raises RuntimeError where there are not `tp`.
    """
    import torch
    from neuronx_distributed.parallel_layers import parallel_state

    group = torch.distributed
    if not group.is_initialized():
        alone: dict[str, Any] = {"store": group.HashStore(), "rank": 0, "world_size": 1}
        group.init_process_group("gloo", **(alone if tp == 1 else {}))
    if group.get_world_size() != tp:
        raise RuntimeError(
            f"{group.get_world_size()} processes share this model, and it was planned for {tp}. "
            f"Start it with torchrun --nproc-per-node {tp}."
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, skip_collective_init=True
        )


def leave_ranks() -> None:
    """End this process's part in the ranks: threads of theirs abort a process that just ends."""
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
