"""Parts compiled and loaded by NxD's ModelBuilder (V2), which only this file knows, and decoders
by NxDI (see application)."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.errors import ArtifactError, CompileError, Qwen3OmniError
from qwen3_omni_neuron.graphs.parallel.layers import Alone
from qwen3_omni_neuron.neuron.nxdi.slots import DecoderGraphs
from qwen3_omni_neuron.neuron.nxdi.spec import DecoderSpec, decoder_application
from qwen3_omni_neuron.neuron.part.compiler_flags import compiler_flags
from qwen3_omni_neuron.neuron.part.group import NxdGroup
from qwen3_omni_neuron.neuron.part.part import CheckedPart
from qwen3_omni_neuron.neuron.part.shards import read_shard, write_shards
from qwen3_omni_neuron.neuron.part.spec import PartSpec
from qwen3_omni_neuron.neuron.part.traced import TracedPart
from qwen3_omni_neuron.neuron.versions import require_sdk

MODEL_FILE = "model.pt"
WORK_FOLDER = "compiler"


class NxdToolchain:
    """Serves neuron.toolchain.Toolchain. Needs the Neuron SDK; see the neuron extra.

    A part's folder is model.pt, its graphs without weights, and weights/, a file a rank.
    """

    def __init__(self) -> None:
        """Raises NotInstalledError where the SDK's packages are not there."""
        require_sdk()

    def compile_part(self, spec: PartSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """As Toolchain.compile_part. What the compiler leaves lies in `folder`/compiler where it
        fails, its log among it."""
        work = folder / WORK_FOLDER
        try:
            model = self._traced_and_compiled(spec, work)
            model.save(str(folder / MODEL_FILE))
        except Exception as error:
            raise _not_compiled(spec.name, error) from error
        shutil.rmtree(work, ignore_errors=True)
        write_shards(spec, checkpoint, folder)

    def load_part(self, spec: PartSpec, folder: Path) -> CheckedPart:
        """As Toolchain.load_part."""
        wanted = TracedPart(spec, Alone()).weights
        shards = [read_shard(folder, rank, wanted) for rank in range(spec.tp)]
        model = self._load(folder / MODEL_FILE)
        compiled, labels = model.get_available_keys(), {graph.label for graph in spec.graphs}
        if strange := sorted(compiled ^ labels):
            raise ArtifactError(
                f"{folder / MODEL_FILE} and this version's graphs differ in {', '.join(strange)}. "
                f"Delete {folder} and compile again: only it will be."
            )
        model.set_weights(shards)
        model.to_neuron()

        def run(label: str, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
            # Named, since graphs of equal shapes are told apart by name alone.
            outputs: Sequence[Tensor] = model(model_name=label, **inputs)
            return outputs

        return CheckedPart(spec, run)

    def compile_decoder(self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path) -> None:
        """As Toolchain.compile_decoder."""
        application = decoder_application(spec.part, checkpoint, spec.config, spec.plan)
        try:
            application.compile_to(folder)
        except (Qwen3OmniError, OSError):
            raise
        except Exception as error:
            raise _not_compiled(spec.part, error) from error

    def load_decoder(
        self, spec: DecoderSpec, checkpoint: Checkpoint, folder: Path
    ) -> DecoderGraphs:
        """As Toolchain.load_decoder."""
        application = decoder_application(spec.part, checkpoint, spec.config, spec.plan)
        application.load_compiled(folder)
        return application

    def _traced_and_compiled(self, spec: PartSpec, work: Path) -> Any:
        """The part's NxDModel, without weights."""
        from neuronx_distributed import ModelBuilder, NxDParallelState

        # Without a device: the ranks are a mock of torch.distributed, and rank 0 is traced.
        ranks = NxDParallelState(
            world_size=spec.tp, tensor_model_parallel_size=spec.tp, lnc_size=spec.lnc
        )
        with ranks, torch.no_grad():
            part = TracedPart(spec, NxdGroup())
            part.allocate()
            builder = ModelBuilder(next(iter(part.graphs.values())))
            for label, module in part.graphs.items():
                builder.model = module  # a module a graph, over the same weights
                builder.trace(kwargs=module.example(), tag=label)
            flags = {g.label: compiler_flags(g, spec.lnc, spec.profile) for g in spec.graphs}
            # No priority model: its layout transformer is compiled for --lnc=1, whatever ours is.
            return builder.compile(compiler_workdir=work, compiler_args=flags)

    def _load(self, path: Path) -> Any:
        from neuronx_distributed import NxDModel

        try:
            model = NxDModel.load(str(path))
        except (OSError, RuntimeError, ValueError) as error:
            raise ArtifactError(
                f"{path} can't be loaded ({error}). Delete {path.parent} and compile again."
            ) from error
        if not isinstance(model, NxDModel):  # what it gives for a file of another version
            raise ArtifactError(
                f"{path} is of another version of neuronx_distributed. Compile again."
            )
        return model


def _not_compiled(part: str, error: Exception) -> CompileError:
    """Whatever tracer and compiler raise, said in one way."""
    return CompileError(
        f"{part} was not compiled: {_reasons(error)}. What the compiler left, with its logs, is "
        "kept in the tree's .failed folder until the next run."
    )


def _reasons(error: BaseException | None) -> str:
    """An error and what led to it: NxD's outermost often says only that something failed."""
    said: list[str] = []
    while error is not None:
        text = str(error) or type(error).__name__
        if not any(text in longer for longer in said):
            said.append(text)
        error = error.__cause__
    return ": ".join(said)
