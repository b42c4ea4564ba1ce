"""The ranks that hold a part together, on NxD."""

from torch import Tensor


class NxdGroup:
    """Serves parallel.layers.Group with the collectives of NxD's tensor-parallel ranks.

    NxD's parallel state has to be initialized where a module that holds this is called, or traced:
    by NxDParallelState while tracing, by torch.distributed's gloo in NxD's CPU mode.
    """

    def sum(self, x: Tensor) -> Tensor:
        from neuronx_distributed.parallel_layers import mappings

        # It adds in place in CPU mode; the layers give it a fresh tensor.
        return mappings.reduce_from_tensor_model_parallel_region(x)

    def gather(self, x: Tensor) -> Tensor:
        from neuronx_distributed.parallel_layers import mappings

        return mappings.gather_from_tensor_model_parallel_region(x)
