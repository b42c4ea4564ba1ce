"""Compiles one model of a plan for TorchNeuron, after setting its environment variables.

They are set before torch is imported: torch imports TorchNeuron where it is installed.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.compilation.manifest import ModelRecord
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.neuron.torchneuron.environment import NEFF_FOLDER, compiling

if TYPE_CHECKING:
    from qwen3_omni_neuron.neuron.torchneuron.runtime import Runtime


def compile_model(
    plan: CompilePlan, model: str, folder: Path, runtime: "Runtime | None" = None
) -> ModelRecord:
    """Compile a model into `folder`, which exists and is empty, in a process of its own.

    See neuron.torchneuron.model_folder.fill_folder for further errors. Raises OptionError for
    settings that contradict TorchNeuron's.
    """
    (folder / NEFF_FOLDER).mkdir()
    with compiling(folder / NEFF_FOLDER, plan.lnc):
        from qwen3_omni_neuron.neuron.torchneuron.model_folder import fill_folder

        return fill_folder(plan, model, folder, runtime)
