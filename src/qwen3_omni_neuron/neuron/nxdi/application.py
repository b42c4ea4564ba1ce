"""One decoder as an NxDI application, which compiles, loads and calls its graphs."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.models.model_wrapper import DecoderModelInstance, ModelWrapper
from torch import Tensor

from qwen3_omni_neuron.neuron.nxdi.decoder import DecoderModel
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import (
    IDLE,
    DecoderSpec,
    Inputs,
    Outputs,
    decode_example,
    prefill_example,
)
from qwen3_omni_neuron.neuron.nxdi.inference_config import DecoderInferenceConfig, inference_config

# As NxDI's Qwen3-MoE: the graph computes which experts are read, as DMA offsets.
EXPERT_FLAGS = " --enable-saturate-infinity --internal-enable-dge-levels vector_dynamic_offsets"
_WORK_FOLDER = "compiling"


class DecoderApplication(NeuronBaseForCausalLM):
    """The graphs of one decoder on NxDI; see neuron.nxdi.nxd_toolchain.DecoderGraphs."""

    _model_cls = DecoderModel

    def __init__(self, spec: DecoderSpec, **options: Any):
        """options: for inference_config, which raises OptionError."""
        no_checkpoint = ""  # NxDI can't read ours
        super().__init__(no_checkpoint, inference_config(spec, **options))
        self.spec = spec
        self._decoders = {spec.plan.max_concurrency: self.token_generation_model}
        for batch in spec.plan.batches[:-1]:
            self._decoders[batch] = self._enable_decode(batch)

    @classmethod
    def get_config_cls(cls) -> type[DecoderInferenceConfig]:
        """Return the config's class, for NxDI."""
        return DecoderInferenceConfig

    def get_model_wrapper_cls(self) -> "type[GraphWrapper]":
        """Return the class that calls a graph, for NxDI."""
        return GraphWrapper

    def shard_weights(self, *_args: object, **_options: object) -> None:
        """Write nothing: NxDI's own method keeps the whole checkpoint in memory."""

    def compile_to(self, folder: Path) -> None:
        """Compile every graph into an empty folder, without a device."""
        work = folder.absolute() / _WORK_FOLDER
        os.environ["BASE_COMPILE_WORK_DIR"] = str(work)  # NxDI reads it
        self.compile(str(folder))
        shutil.rmtree(work)

    def close(self) -> None:
        """Release graphs, weights and KV cache."""
        self.traced_model = None
        for wrapper in self.models:
            wrapper.model = None
        self.is_loaded_to_neuron = False

    def prefill(self, inputs: Inputs) -> Outputs:
        """Run one prompt; see DecoderGraphs.prefill."""
        return _call(self.context_encoding_model, inputs)

    def decode(self, inputs: Inputs) -> Outputs:
        """Run one row for each of several slots; see DecoderGraphs.decode."""
        slots: list[int] = inputs[3].tolist()
        if len(slots) == self.spec.plan.max_concurrency:
            assert all(slot in (index, IDLE) for index, slot in enumerate(slots)), slots
        return _call(self._decoders[len(slots)], inputs)

    def _enable_decode(self, batch: int) -> "GraphWrapper":
        config = copy.deepcopy(self.token_generation_model.config)
        config.neuron_config.batch_size = batch
        wrapper = self.model_wrapper(
            config=config,
            model_cls=self._model_cls,
            tag=f"token_generation_model_of_{batch}",
            compiler_args=self.get_compiler_args(),
            priority_model_idx=None,
        )
        self.models.append(wrapper)
        return wrapper


class GraphWrapper(ModelWrapper):
    """Calls a graph with inputs of its bucket and batch.

    compiler_args: NxDI's own flags and EXPERT_FLAGS.
    """

    config: DecoderInferenceConfig

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.compiler_args += EXPERT_FLAGS

    def input_generator(self) -> list[Inputs]:
        """Return example inputs of every bucket."""
        return [self._example(bucket) for bucket in self.neuron_config.buckets]

    def get_model_instance(self) -> "CapturingInstance":
        """Return the source of the traced modules."""
        return CapturingInstance(
            model_cls=self.model_cls, config=self.config, **self.model_init_kwargs
        )

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """Return logits and hidden states. The KV cache stays on the device."""
        if self.model is None:
            raise RuntimeError(f"{self.tag} was called before its weights were loaded.")
        return self._forward(*inputs)

    def _example(self, bucket: int) -> Inputs:
        config, dtype = self.config, self.neuron_config.torch_dtype
        width, rows = config.decoder.hidden_size, config.takes_rows
        if self.neuron_config.is_prefill_stage:
            layers = None if rows else config.deepstack_layers
            return prefill_example(bucket, width, dtype, layers)
        return decode_example(self.neuron_config.batch_size, bucket, width, dtype, rows)


class CapturingInstance(DecoderModelInstance):
    """Builder of a bucket's module, which has one more output than NxDI counts."""

    def get(self, bucket_rank: int, **kwargs: object) -> tuple[DecoderModel, dict[Tensor, int]]:
        """Return the module, and the output that updates each KV cache tensor."""
        module, outputs = super().get(bucket_rank, **kwargs)
        return module, {tensor: output + 1 for tensor, output in outputs.items()}


def _call(wrapper: GraphWrapper, inputs: Inputs) -> Outputs:
    logits, hidden = wrapper(*inputs)
    return logits[:, -1], hidden
