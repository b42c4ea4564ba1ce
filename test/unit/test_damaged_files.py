"""Files of a model that are damaged, or were written to do harm, end in an error of the package."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import fingerprint
from qwen3_omni_neuron.compilation.manifest import Manifest, write_manifest
from qwen3_omni_neuron.compilation.plan import MODELS, make_plan
from qwen3_omni_neuron.cpu.target import CPU, LIMITS
from qwen3_omni_neuron.cpu.weights import compile_model
from testing.imports import ROOT
from testing.peak_memory import needs_proc
from testing.repeats import again

COUNT = 10_000
SHORT = 150  # in CI
PORTIONS = 20


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tree that was compiled from it."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("whole") / "checkpoint"))
    tree = folder / "compiled"
    plan, models = make_plan(folder, read_config(folder), LIMITS, max_concurrency=1), {}
    for model in MODELS:
        (tree / model).mkdir(parents=True)
        models[model] = compile_model(plan, model, tree / model)
    write_manifest(tree, Manifest(fingerprint(folder), plan.settings, CPU.versions(), models))
    return folder


@needs_proc
@pytest.mark.parametrize(
    "seeds",
    [
        range(SHORT),
        *(
            again(range(start, start + COUNT // PORTIONS))
            for start in range(SHORT, COUNT, COUNT // PORTIONS)
        ),
    ],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
def test_a_damaged_file_ends_in_an_error_of_ours_or_loads(
    whole: Path, tmp_path: Path, seeds: Sequence[int]
) -> None:
    command = [sys.executable, "-m", "testing.damaged_files", str(whole)]
    command += [str(seeds[0]), str(seeds[-1] + 1), str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    ends: list[tuple[int, str, str]] = json.loads(run.stdout)
    assert [seed for seed, _, _ in ends] == [*seeds]
    failed = [f"{seed} {name}: {end}" for seed, name, end in ends if end.startswith("failed")]
    assert not failed, "\n".join(failed)
    kinds = {end.partition(":")[0] for _, _, end in ends}
    assert kinds >= {"loaded", "CheckpointError", "ArtifactError", "StoredSessionError"}
