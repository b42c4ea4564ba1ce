"""DecoderApplication in NxDI's CPU mode. Imports NxDI: see testing.neuron.nxdi_sources."""

from typing import Any

import torch
from neuronx_distributed.trace.trace import get_sharded_checkpoint
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.neuron.nxdi.application import DecoderApplication, GraphWrapper
from qwen3_omni_neuron.neuron.nxdi.decoder import DecoderModel
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec
from testing.neuron.nxdi_sources import join_ranks
from testing.neuron.whole_weights import State, whole_weights


class WholeWeights(DecoderApplication):
    """A decoder whose weights NxDI can read whole, to cut them in its own way."""

    def __init__(self, spec: DecoderSpec, checkpoint: Checkpoint, **options: Any):
        super().__init__(spec, **options)
        self._spec, self._checkpoint = spec, checkpoint

    def checkpoint_loader_fn(self, mmap: bool = False) -> State:
        return whole_weights(self._spec, self._checkpoint)


class CpuModeDecoder(WholeWeights):
    """A decoder whose graphs are NxDI's modules, called on the CPU."""

    def __init__(self, spec: DecoderSpec, checkpoint: Checkpoint):
        if spec.tp > 1 and spec.dtype != torch.float32:
            raise ValueError(
                f"NxDI's CPU mode over {spec.tp} processes is for float32, got "
                f"{spec.dtype}. Choose float32, or one process."
            )
        # For buckets of 256 n NxDI takes its attention kernel on the CPU, too, which has none.
        super().__init__(spec, checkpoint, on_cpu=True, attn_kernel_enabled=False)

    def get_model_wrapper_cls(self) -> type[GraphWrapper]:
        return CpuModeWrapper

    def load_weights_here(self) -> None:
        """Make the modules of all graphs, over this rank's share of the weights and one KV cache.

        This replaces NxDI's to_cpu, which starts torch.distributed anew for each application, and
        reads the weights anew for each graph.
        """
        join_ranks(self.spec.tp)
        first: DecoderModel | None = None
        for wrapper in self.models:
            instance = wrapper.get_model_instance()
            instance.load_module()
            model = instance.module
            if first is None:
                first = self._filled(model)
            else:
                model.load_state_dict(first.state_dict(), assign=True)
                model.kv_mgr.past_key_values = first.kv_mgr.past_key_values
            wrapper.model = model
        self.eval()

    def _filled(self, model: DecoderModel) -> DecoderModel:
        state = self.checkpoint_loader_fn()
        # This call removes the other ranks' shares from `state`.
        get_sharded_checkpoint(state, model, torch.distributed.get_rank(), self.spec.tp)
        missing, _ = model.load_state_dict(state, strict=False)
        # The cache starts empty, and shares the rank with the model, where it is filled.
        unfilled = [name for name in missing if not name.startswith("kv_mgr.")]
        assert not unfilled, f"no weights for {unfilled}"
        return model


class CpuModeWrapper(GraphWrapper):
    """Calls a graph's module, and keeps the new KV cache as a device would."""

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        # A compiled graph has one bucket. This module serves all of them, and the length of the
        # attention mask tells which.
        self.model.n_positions = inputs[1].shape[-1]
        logits, hidden, *new_cache = super().forward(*inputs)
        for kept, new in zip(self.model.kv_mgr.past_key_values, new_cache, strict=True):
            kept.data = new
        return [logits, hidden]
