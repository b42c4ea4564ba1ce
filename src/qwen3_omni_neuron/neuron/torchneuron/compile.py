"""Compiles one model of a plan for TorchNeuron, after setting its environment variables."""

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.compilation.manifest import ModelRecord, record_files
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.neuron.torchneuron.environment import (
    CACHES,
    COMPILE_ONLY,
    LOCAL_FOLDER,
    set_before_import,
    settings,
)

if TYPE_CHECKING:
    from qwen3_omni_neuron.neuron.torchneuron.runtime import TorchNeuron


def compile_model(
    plan: CompilePlan, model: str, folder: Path, runtime: "TorchNeuron | None" = None
) -> ModelRecord:
    """Compile a model into the empty `folder`, in its own process.

    Raises the errors of neuron.torchneuron.runtime.fill_folder, and OptionError.
    """
    started = time.monotonic()
    # TorchNeuron's copies are in `folder`, too, so that a killed run leaves nothing elsewhere.
    for name in (*CACHES.values(), LOCAL_FOLDER):
        (folder / name).mkdir()
    cores = {"NEURON_LOGICAL_NC_CONFIG": str(plan.lnc)}
    set_before_import({**settings(folder, plan.opt_level), **COMPILE_ONLY, **cores})
    from qwen3_omni_neuron.neuron.torchneuron.runtime import fill_folder

    graphs = fill_folder(plan, model, folder, runtime)
    shutil.rmtree(folder / LOCAL_FOLDER)
    files = record_files(folder)
    return ModelRecord(graphs, files, round(time.monotonic() - started, 3))
