"""The toolchain of a Neuron host: NxD's ModelBuilder (V2) for parts, NxDI for decoders.

ModelBuilder needs one forward with named parameters per model. State is a registered buffer that
forward replaces, shared by name. Source: API reference, "In-place buffer updates".
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.errors import ArtifactError, CompileError, Qwen3OmniError
from qwen3_omni_neuron.neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.neuron.graphs.layers import Alone, Group
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import EXECUTABLE_FILE, DecoderSpec, Inputs, Outputs
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import write_decoder_shards
from qwen3_omni_neuron.neuron.part import LoadedPart, PartSpec, device_type, to_device_type
from qwen3_omni_neuron.neuron.shards import PartShare, read_part_shard, write_part_shards
from qwen3_omni_neuron.neuron.versions import require_sdk

WORK_FOLDER = "compiler"
# Parts whose graphs run every frame.
_EVERY_FRAME = ("code_predictor", "code2wav")


class DecoderGraphs(Protocol):
    """One decoder's graphs on its cores, over the inputs of neuron.nxdi.decoder_spec."""

    spec: DecoderSpec

    def prefill(self, inputs: Inputs) -> Outputs:
        """Run one prompt. Returns its last row's logits."""
        ...

    def decode(self, inputs: Inputs) -> Outputs:
        """Run one row for each of several slots, of one of the spec's batches; see IDLE."""
        ...

    def close(self) -> None:
        """Release graphs, weights and KV cache."""
        ...


class TracedPart(PartShare):
    """One rank's share of a part, and a module per graph."""

    def __init__(self, spec: PartSpec, group: Group):
        super().__init__(spec, group)
        names = {tensor.name: None for graph in spec.graphs for tensor in graph.inputs}
        kind = _with_named_inputs(tuple(names))
        self.graphs = {graph.label: kind(graph, self.owner) for graph in spec.graphs}
        """Modules by label; all share the same weights."""


class TracedGraph(nn.Module):
    """One graph: named inputs to outputs, with state in buffers."""

    def __init__(self, graph: Graph, owner: nn.Module):
        super().__init__()
        self.owner = owner
        self._graph = graph
        for spec in graph.state:
            zeros = torch.zeros(spec.shape, dtype=device_type(spec.dtype))
            self.register_buffer(state_name(spec), zeros, persistent=False)

    def example(self, seed: int = 0) -> dict[str, Tensor]:
        """Return inputs for one call, by name."""
        tensors = self._graph.example(seed)
        return {
            spec.name: to_device_type(tensor)
            for spec, tensor in zip(self._graph.inputs, tensors, strict=False)
        }

    def run(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run the graph and update the state. given: the graph's inputs, and possibly others."""
        graph = self._graph
        inputs = _typed(graph.inputs, (given[spec.name] for spec in graph.inputs))
        state = _typed(graph.state, (getattr(self, state_name(spec)) for spec in graph.state))
        outputs, new_state = graph.call(self.owner, inputs, state)
        for spec, old, tensor in zip(graph.state, state, new_state, strict=True):
            # The tracer treats buffers that forward does not replace as weights.
            assert tensor is not old, f"{graph.label} does not update {spec.name}"
            setattr(self, state_name(spec), to_device_type(tensor))
        return tuple(map(to_device_type, outputs))


def _with_named_inputs(names: tuple[str, ...]) -> type[TracedGraph]:
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for name in names:
        parameters.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None))
    signature = Signature(parameters)

    def forward(*args: Any, **kwargs: Tensor) -> tuple[Tensor, ...]:
        given = signature.bind(*args, **kwargs).arguments
        module: TracedGraph = given.pop("self")
        return module.run(given)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type("NamedTracedGraph", (TracedGraph,), {"forward": forward})


def state_name(spec: TensorSpec) -> str:
    """Return the name of a state's buffer, without dots."""
    return "state_" + spec.name.replace(".", "_")


def _typed(specs: Iterable[TensorSpec], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.to(spec.dtype) for spec, tensor in zip(specs, tensors, strict=True))


class NxdToolchain:
    """Compiles parts and decoders into folders, and loads them from there."""

    def __init__(self) -> None:
        """Raises NotInstalledError, with the SDK's missing packages."""
        require_sdk()

    def compile_part(self, spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """Write a part's graphs and weights into an empty folder.

        Raises CheckpointError, CompileError, OSError.
        """
        work = folder / WORK_FOLDER
        try:
            model = self._traced_and_compiled(spec, work)
            model.save(str(folder / EXECUTABLE_FILE))
        except Exception as error:
            raise _not_compiled(spec.name, error) from error
        shutil.rmtree(work, ignore_errors=True)
        write_part_shards(spec, checkpoint, folder)

    def load_part(self, spec: PartSpec, folder: Path) -> LoadedPart:
        """Load a part that was compiled from this spec. Raises ArtifactError."""
        layout = PartShare(spec, Alone()).weights
        shards = [read_part_shard(folder, rank, layout) for rank in range(spec.tp)]
        model = self._loaded(folder / EXECUTABLE_FILE)
        compiled, labels = model.get_available_keys(), {graph.label for graph in spec.graphs}
        if different := sorted(compiled ^ labels):
            raise ArtifactError(
                f"{folder / EXECUTABLE_FILE} and this version's graphs differ in "
                f"{', '.join(different)}. Delete {folder} and compile again, which skips the rest."
            )
        model.set_weights(shards)
        model.to_neuron()

        def run(label: str, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
            # By name, since several graphs may have inputs of equal shapes.
            outputs: Sequence[Tensor] = model(model_name=label, **inputs)
            return outputs

        return LoadedPart(spec.graphs, run)

    def compile_decoder(self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """Write a decoder's graphs and weights. Raises as compile_part."""
        from qwen3_omni_neuron.neuron.nxdi.application import DecoderApplication

        application = DecoderApplication(spec)
        try:
            application.compile_to(folder)
        except (Qwen3OmniError, OSError):
            raise
        except Exception as error:
            raise _not_compiled(spec.part, error) from error
        write_decoder_shards(spec, checkpoint, folder)

    def load_decoder(self, spec: DecoderSpec, folder: Path) -> DecoderGraphs:
        """Load a decoder that was compiled from this spec. Raises as load_part."""
        from qwen3_omni_neuron.neuron.nxdi.application import DecoderApplication

        application = DecoderApplication(spec)
        application.load(str(folder), skip_warmup=True)
        return application

    def _traced_and_compiled(self, spec: PartSpec, work: Path) -> Any:
        from neuronx_distributed import ModelBuilder, NxDParallelState

        # NxD replaces torch.distributed by a mock, and traces rank 0: no device is needed.
        ranks = NxDParallelState(
            world_size=spec.tp, tensor_model_parallel_size=spec.tp, lnc_size=spec.lnc
        )
        with ranks, torch.no_grad():
            part = TracedPart(spec, NxdGroup())
            part.allocate()
            builder = ModelBuilder(next(iter(part.graphs.values())))
            for label, module in part.graphs.items():
                builder.model = module  # one per graph, over the same weights
                builder.trace(kwargs=module.example(), tag=label)
            flags = {g.label: compiler_flags(g, spec.lnc) for g in spec.graphs}
            # No priority model: its layout transformer would be compiled for --lnc=1.
            return builder.compile(compiler_workdir=work, compiler_args=flags)

    def _loaded(self, path: Path) -> Any:
        from neuronx_distributed import NxDModel

        try:
            model = NxDModel.load(str(path))
        except (OSError, RuntimeError, ValueError) as error:
            raise ArtifactError(
                f"{path} can't be loaded ({error}). Delete {path.parent} and compile again."
            ) from error
        if not isinstance(model, NxDModel):  # for a file of another version
            raise ArtifactError(
                f"{path} is of another version of neuronx_distributed. Compile again."
            )
        return model


class NxdGroup:
    """Ranks that share a part's weights: a neuron.graphs.layers.Group over NxD's parallel state."""

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors; see Group.sum."""
        from neuronx_distributed.parallel_layers import mappings

        # It may sum in place; the layers pass a fresh tensor.
        return mappings.reduce_from_tensor_model_parallel_region(x)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along the last axis."""
        from neuronx_distributed.parallel_layers import mappings

        return mappings.gather_from_tensor_model_parallel_region(x)


def compiler_flags(graph: Graph, lnc: int) -> str:
    """Return neuronx-cc's flags: -O2 for graphs of every frame, else the faster -O1."""
    level = 2 if graph.part in _EVERY_FRAME else 1
    return f"--auto-cast=none --model-type=transformer -O{level} --lnc={lnc}"


def _not_compiled(part: str, error: Exception) -> CompileError:
    return CompileError(
        f"{part} was not compiled: {_reasons(error)}. The compiler's files and logs are in the "
        "tree's .failed folder until the next run."
    )


def _reasons(error: BaseException | None) -> str:
    """Join the messages of an error and its causes: NxD's outermost is vague."""
    messages: list[str] = []
    while error is not None:
        text = str(error) or type(error).__name__
        if not any(text in longer for longer in messages):
            messages.append(text)
        error = error.__cause__
    return ": ".join(messages)
