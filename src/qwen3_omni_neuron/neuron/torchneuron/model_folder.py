"""The folder of one compiled model of a plan: weights by rank, and NEFFs."""

from pathlib import Path

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.checkpoint.parameters import check_names
from qwen3_omni_neuron.compilation.manifest import GraphRecord
from qwen3_omni_neuron.compilation.plan import MODEL_PARTS, MODEL_STAGES, CompilePlan
from qwen3_omni_neuron.errors import CompileError
from qwen3_omni_neuron.neuron.graphs.all import graph_records
from qwen3_omni_neuron.neuron.part import PartSpec, part_spec, to_device_type
from qwen3_omni_neuron.neuron.shards import part_shard_bytes, write_part_shards
from qwen3_omni_neuron.neuron.torchneuron.graph import PartGraphs
from qwen3_omni_neuron.neuron.torchneuron.runtime import TorchNeuron


def fill_folder(
    plan: CompilePlan, model: str, folder: Path, runtime: TorchNeuron | None = None
) -> tuple[GraphRecord, ...]:
    """Compile a model's parts into `folder`, which exists and has an empty folder for NEFFs.

    neff             the compiled graphs of all its parts, as TorchNeuron's cache has them
    PART/weights     a file for each rank, as for target neuron

    All ranks run the same graphs, so only rank 0's are compiled, and no device is needed. Raises
    CheckpointError, CompileError, OSError, NotInstalledError.
    """
    config, checkpoint = read_config(plan.model), Checkpoint(plan.model, plan.adapters)
    # Check the names before hours of compiling, not after.
    check_names(list(lay_out(config, (MODEL_STAGES[model],))[1].values()), checkpoint)
    device = (runtime or TorchNeuron()).start_compiling(plan.tp.of(model))
    for name in MODEL_PARTS[model]:
        spec = part_spec(config, plan, name)
        (folder / name).mkdir()
        write_part_shards(spec, checkpoint, folder / name)
        _compile_part(spec, PartGraphs(spec, device))
    return graph_records(config, plan, model)


def expected_bytes(plan: CompilePlan, model: str) -> int:
    """Return the size in bytes of the weights of a model's parts; NEFFs come on top."""
    config = read_config(plan.model)
    return sum(part_shard_bytes(part_spec(config, plan, name)) for name in MODEL_PARTS[model])


def _compile_part(spec: PartSpec, part: PartGraphs) -> None:
    """Call each graph once. Raises CompileError that names the graph."""
    for graph in spec.graphs:
        inputs = {tensor.name: to_device_type(tensor.idle_input()) for tensor in graph.inputs}
        try:
            part.run(graph.label, inputs)
        except Exception as error:
            raise CompileError(
                f"{graph.label} was not compiled: {error}. Set TORCH_NEURONX_DEBUG_DIR and "
                "TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS=1 to keep what it was made of."
            ) from error
