"""One decoder on NxDI: its graphs, its weights, how it is compiled, loaded and called."""

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.trace.trace import get_sharded_checkpoint
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.models.model_wrapper import DecoderModelInstance, ModelWrapper
from torch import Tensor

from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.neuron.nxdi.decoder import DecoderModel
from qwen3_omni_neuron.neuron.nxdi.inference_config import DecoderInferenceConfig
from qwen3_omni_neuron.neuron.nxdi.inputs import IDLE, Inputs, decode_example, prefill_example
from qwen3_omni_neuron.neuron.nxdi.plan import DecoderPlan
from qwen3_omni_neuron.neuron.nxdi.slots import Outputs
from qwen3_omni_neuron.neuron.nxdi.source import DecoderWeights, State
from qwen3_omni_neuron.neuron.part_files import decoder_files

# What NxDI adds for its own Qwen3-MoE to the flags that it has for every model: experts are read
# by numbers that the graph computes, which the DMA engines take as they come.
EXPERT_FLAGS = " --enable-saturate-infinity --internal-enable-dge-levels vector_dynamic_offsets"
_WORK_FOLDER = "compiling"


def decode_tag(batch: int) -> str:
    """Of a decode graph of fewer rows than there are slots."""
    return f"token_generation_model_of_{batch}"


class CapturingInstance(DecoderModelInstance):
    """What NxDI's builder traces for a bucket, which has one output more than it counts."""

    def get(self, bucket_rank: int, **kwargs: object) -> tuple[DecoderModel, dict[Tensor, int]]:
        """The module, and which output each part of its KV cache is replaced by."""
        module, outputs = super().get(bucket_rank, **kwargs)
        return module, {held: output + 1 for held, output in outputs.items()}


class GraphWrapper(ModelWrapper):
    """Calls a graph with inputs that are padded to their bucket and their batch already.

    compiler_args: NxDI's own for this graph where it gives none: no cast, a transformer, the
    LNC, -O1 for prefill and -O2 for decode, collectives beside computation; and EXPERT_FLAGS.
    """

    config: DecoderInferenceConfig

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.compiler_args += EXPERT_FLAGS

    def input_generator(self) -> list[Inputs]:
        """An example of the inputs for every bucket, to compile it with."""
        return [self._example(bucket) for bucket in self.neuron_config.buckets]

    def get_model_instance(self) -> CapturingInstance:
        return CapturingInstance(
            model_cls=self.model_cls, config=self.config, **self.model_init_kwargs
        )

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """Logits, hidden states, and in CPU mode the new KV cache."""
        if self.model is None:
            raise RuntimeError(f"{self.tag} was called before its weights were loaded.")
        if not self.is_neuron():
            # A compiled graph is one bucket; in CPU mode one module stands for all of them, and
            # the attention mask tells which is meant.
            self.model.n_positions = inputs[1].shape[-1]
        return self._forward(*inputs)

    def _example(self, bucket: int) -> Inputs:
        config, dtype = self.config, self.neuron_config.torch_dtype
        width, rows = config.decoder.hidden_size, config.takes_rows
        if self.neuron_config.is_prefill_stage:
            layers = None if rows else config.deepstack_layers
            return prefill_example(bucket, width, dtype, layers)
        return decode_example(self.neuron_config.batch_size, bucket, width, dtype, rows)


class DecoderApplication(NeuronBaseForCausalLM):
    """Serves neuron.slots.DecoderGraphs.

    weights: read whole in CPU mode, and cut into the cores' files when the decoder is compiled.
    """

    _model_cls = DecoderModel

    def __init__(self, config: DecoderInferenceConfig, plan: DecoderPlan, weights: DecoderWeights):
        super().__init__(str(weights.checkpoint.folder), config)
        self.plan, self._weights = plan, weights
        self._decoders = {plan.slots: self.token_generation_model}
        for batch in plan.batches[:-1]:
            self._decoders[batch] = self._enable_decode(batch)

    @classmethod
    def get_config_cls(cls) -> type[DecoderInferenceConfig]:
        return DecoderInferenceConfig

    def get_model_wrapper_cls(self) -> type[GraphWrapper]:
        return GraphWrapper

    def checkpoint_loader_fn(self, mmap: bool = False) -> State:
        return self._weights.whole(self.plan)

    def shard_weights(self, folder: str, *_args: object, **_options: object) -> None:
        """In place of NxDI's, which holds all cores' shares beside the whole checkpoint."""
        self._weights.write_shards(Path(folder), self.plan, self.config.takes_rows)

    def compile_to(self, folder: Path) -> None:
        """Compile every graph for Neuron and write decoder_files.decoder_files into `folder`, which
        exists and is empty. Needs the Neuron SDK's compiler, and no device.

        What the compiler leaves behind lies in `folder` meanwhile, and stays there, with its logs,
        where it fails. Raises CheckpointError, OSError, and whatever NxDI and its compiler raise.
        """
        assert not self.plan.on_cpu, "this plan is for NxDI's CPU mode"
        work = folder.absolute() / _WORK_FOLDER
        with _environment({"BASE_COMPILE_WORK_DIR": str(work), "NXD_CPU_MODE": "0"}):
            self.compile(str(folder))
        shutil.rmtree(work)

    def load_compiled(self, folder: Path) -> None:
        """Put the graphs and each core's weights on the cores that this process sees.

        No graph has been called then: see warm_up. Raises ArtifactError where a file is missing.
        That the plan is the one that was compiled is for the manifest to say.
        """
        missing = [name for name in decoder_files(self.plan.tp) if not (folder / name).is_file()]
        if missing:
            raise ArtifactError(
                f"{folder} is no compiled decoder for {self.plan.tp} cores: it lacks "
                f"{', '.join(missing)}. Compile it."
            )
        with _environment({"NXD_CPU_MODE": "0"}):
            self.load(str(folder), skip_warmup=True)

    def close(self) -> None:
        """Give back the graphs, the weights and the KV cache."""
        self.traced_model = None
        for wrapper in self.models:
            wrapper.model = None
        self.is_loaded_to_neuron = False

    def prefill(self, inputs: Inputs) -> Outputs:
        """Run one prompt. Logits [1, vocab] are of its last row."""
        return self._call(self.context_encoding_model, inputs)

    def decode(self, inputs: Inputs) -> Outputs:
        """Run a row of each of as many slots as one of the plan's batches says, IDLE ones included.
        Of all slots, row i is line i of the cache."""
        slots: list[int] = inputs[3].tolist()
        if len(slots) == self.plan.slots:
            assert all(slot in (index, IDLE) for index, slot in enumerate(slots)), slots
        return self._call(self._decoders[len(slots)], inputs)

    def load_in_cpu_mode(self) -> None:
        """Build the graphs as modules on the CPU, this rank's share of them.

        In place of NxDI's own to_cpu, which starts torch.distributed anew for each application,
        and reads the weights anew for each graph. Raises ValueError for bfloat16 over several
        ranks, which can't add it up.
        """
        if self.plan.tp > 1 and self.plan.dtype != torch.float32:
            raise ValueError(
                f"NxDI's CPU mode over {self.plan.tp} processes is for float32, got "
                f"{self.plan.dtype}. Choose float32, or one process."
            )
        join_ranks(self.plan.tp)
        first: DecoderModel | None = None
        for wrapper in self.models:
            # Some of NxDI's parts are made in float32 whatever the config says.
            model = wrapper.model_cls(wrapper.config).eval().to(self.plan.dtype)
            if first is None:
                first = self._filled(model)
            else:
                model.load_state_dict(first.state_dict(), assign=True)
                model.kv_mgr.past_key_values = first.kv_mgr.past_key_values
            wrapper.model = model
        self.eval()

    def _enable_decode(self, batch: int) -> GraphWrapper:
        """NxDI has one decode graph; one row costs a graph of 16 several times less."""
        config = copy.deepcopy(self.token_generation_model.config)
        config.neuron_config.batch_size = batch
        wrapper = self.model_wrapper(
            config=config,
            model_cls=self._model_cls,
            tag=decode_tag(batch),
            compiler_args=self.get_compiler_args(),
            priority_model_idx=None,
        )
        self.models.append(wrapper)
        return wrapper

    def _filled(self, model: DecoderModel) -> DecoderModel:
        state = self.checkpoint_loader_fn()
        # It drops from `state` what other ranks hold.
        get_sharded_checkpoint(state, model, torch.distributed.get_rank(), self.plan.tp)
        missing, _ = model.load_state_dict(state, strict=False)
        # The cache starts empty, and shares the rank with the model, where it is filled.
        unfilled = [name for name in missing if not name.startswith("kv_mgr.")]
        assert not unfilled, f"no weights for {unfilled}"
        return model

    def _call(self, wrapper: GraphWrapper, inputs: Inputs) -> Outputs:
        logits, hidden, *new_cache = wrapper(*inputs)
        if not wrapper.is_neuron():  # a device keeps it
            for held, new in zip(wrapper.model.kv_mgr.past_key_values, new_cache, strict=True):
                held.data = new
        return logits[:, -1], hidden


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables that NxD and NxDI read, as they are meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def join_ranks(tp: int) -> None:
    """Let this process be one of `tp` that share a model in CPU mode: alone where tp is 1, else as
    torchrun started it. Decoders of one process share the ranks.

    Raises RuntimeError where the ranks don't fit.
    """
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
