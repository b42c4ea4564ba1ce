"""The toolchain of a Neuron host: NxD's ModelBuilder (V2) for parts, NxDI for decoders.

Only this file and `neuron.nxdi.traced`, which makes the modules to be traced, know ModelBuilder.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.errors import (
    ArtifactError,
    CompileError,
    Qwen3OmniError,
)
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.graphs.parallel.layers import Alone
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import EXECUTABLE_FILE, DecoderSpec
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import write_decoder_shards
from qwen3_omni_neuron.neuron.nxdi.toolchain import DecoderGraphs
from qwen3_omni_neuron.neuron.nxdi.traced import TracedPart
from qwen3_omni_neuron.neuron.part import LoadedPart, PartSpec
from qwen3_omni_neuron.neuron.shards import PartShare, read_part_shard, write_part_shards
from qwen3_omni_neuron.neuron.versions import require_sdk

WORK_FOLDER = "compiler"
# The parts whose graphs run every frame.
_EVERY_FRAME = ("code_predictor", "code2wav")


class NxdToolchain:
    """The Toolchain of the Neuron SDK (see neuron.nxdi.toolchain.Toolchain).

    A part's folder has model.pt, its graphs without weights, and weights/, a file for each rank.
    A decoder's folder has neuron_config.json, too, which is not read.
    """

    def __init__(self) -> None:
        """Raises NotInstalledError, which names the packages of the SDK that are absent."""
        require_sdk()

    def compile_part(self, spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """Write a part's graphs and weights; see Toolchain.compile_part.

        Where the compiler fails, its files stay in `folder`/compiler, with its log.
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
        """Load a part; see Toolchain.load_part."""
        layout = PartShare(spec, Alone()).weights
        shards = [read_part_shard(folder, rank, layout) for rank in range(spec.tp)]
        model = self._loaded(folder / EXECUTABLE_FILE)
        compiled, labels = model.get_available_keys(), {graph.label for graph in spec.graphs}
        if different := sorted(compiled ^ labels):
            raise ArtifactError(
                f"{folder / EXECUTABLE_FILE} and this version's graphs differ in "
                f"{', '.join(different)}. Delete {folder} and compile again: only it will be."
            )
        model.set_weights(shards)
        model.to_neuron()

        def run(label: str, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
            # Choose the graph by name, since several graphs may take inputs of equal shapes.
            outputs: Sequence[Tensor] = model(model_name=label, **inputs)
            return outputs

        return LoadedPart(spec.graphs, run)

    def compile_decoder(self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """Write a decoder's graphs and weights; see Toolchain.compile_decoder."""
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
        """Load a decoder; see Toolchain.load_decoder."""
        from qwen3_omni_neuron.neuron.nxdi.application import DecoderApplication

        application = DecoderApplication(spec)
        application.load_compiled(folder)
        return application

    def _traced_and_compiled(self, spec: PartSpec, work: Path) -> Any:
        """Return the part's NxDModel, without weights."""
        from neuronx_distributed import ModelBuilder, NxDParallelState

        # No device is needed: NxD replaces torch.distributed by a mock, and traces rank 0.
        ranks = NxDParallelState(
            world_size=spec.tp, tensor_model_parallel_size=spec.tp, lnc_size=spec.lnc
        )
        with ranks, torch.no_grad():
            part = TracedPart(spec, NxdGroup())
            part.allocate()
            builder = ModelBuilder(next(iter(part.graphs.values())))
            for label, module in part.graphs.items():
                builder.model = module  # a module for each graph, over the same weights
                builder.trace(kwargs=module.example(), tag=label)
            flags = {g.label: compiler_flags(g, spec.lnc) for g in spec.graphs}
            # No priority model: its layout transformer is compiled for --lnc=1, whatever ours is.
            return builder.compile(compiler_workdir=work, compiler_args=flags)

    def _loaded(self, path: Path) -> Any:
        from neuronx_distributed import NxDModel

        try:
            model = NxDModel.load(str(path))
        except (OSError, RuntimeError, ValueError) as error:
            raise ArtifactError(
                f"{path} can't be loaded ({error}). Delete {path.parent} and compile again."
            ) from error
        if not isinstance(model, NxDModel):  # its result for a file of another version
            raise ArtifactError(
                f"{path} is of another version of neuronx_distributed. Compile again."
            )
        return model


class NxdGroup:
    """Ranks that share a part's weights: a neuron.graphs.parallel.layers.Group over NxD's.

    NxD's parallel state has to be initialized where a module with such a group is called or traced:
    by NxDParallelState while tracing, by torch.distributed in a rank's process.
    """

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors; see Group.sum."""
        from neuronx_distributed.parallel_layers import mappings

        # It may add in place; the layers pass a fresh tensor.
        return mappings.reduce_from_tensor_model_parallel_region(x)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along the last axis; see Group.gather."""
        from neuronx_distributed.parallel_layers import mappings

        return mappings.gather_from_tensor_model_parallel_region(x)


def compiler_flags(graph: Graph, lnc: int) -> str:
    """Return neuronx-cc's flags for one graph of a part.

    They have -O2 for graphs that run every frame, and -O1, which compiles sooner, for those that
    run once a request. lnc: physical cores of a logical core, the runtime's
    NEURON_LOGICAL_NC_CONFIG.
    """
    level = 2 if graph.part in _EVERY_FRAME else 1
    return f"--auto-cast=none --model-type=transformer -O{level} --lnc={lnc}"


def _not_compiled(part: str, error: Exception) -> CompileError:
    """Return CompileError for any error that the tracer or the compiler raises."""
    return CompileError(
        f"{part} was not compiled: {_reasons(error)}. The compiler's files, with its logs, are "
        "kept in the tree's .failed folder until the next run."
    )


def _reasons(error: BaseException | None) -> str:
    """Join the messages of an error and its causes.

    NxD's outermost message often says only that something failed.
    """
    messages: list[str] = []
    while error is not None:
        text = str(error) or type(error).__name__
        if not any(text in longer for longer in messages):
            messages.append(text)
        error = error.__cause__
    return ": ".join(messages)
