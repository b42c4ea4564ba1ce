"""The ranks that share a model in NxDI's CPU mode, over gloo."""

from typing import Any

import torch


def join_ranks(tp: int) -> None:
    """Make this process one of `tp` ranks; for tp above 1, torchrun must have started it.

    Decoders of one process share the ranks. Raises RuntimeError where there are not `tp`.
    """
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
