"""The settings that TorchNeuron needs: the list, and that nothing contradicts it."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from qwen3_omni_neuron.checkpoint.files import fingerprint
from qwen3_omni_neuron.compilation.manifest import Manifest, write_manifest
from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.compilation.tree import open_tree
from qwen3_omni_neuron.cpu.target import CPU
from qwen3_omni_neuron.errors import ArtifactError, OptionError
from qwen3_omni_neuron.neuron.nxdi.target import NEURON
from qwen3_omni_neuron.neuron.target import TORCHNEURON
from qwen3_omni_neuron.neuron.torchneuron.environment import (
    CACHES,
    COMPILE_ONLY,
    COMPILER_FLAGS,
    LOCAL_CACHE_FOLDER,
    SETTINGS,
    set_before_import,
    settings,
)

SHOWN = (*settings(Path("/model"), 1), *COMPILE_ONLY)


@pytest.fixture(autouse=True)
def unset(monkeypatch) -> None:
    for name in SHOWN:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def test_nothing_may_run_on_the_cpu_in_silence() -> None:
    assert dict(SETTINGS) == {
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
        "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1",
        "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY": "1",
        "TORCH_NEURONX_RETAIN_DEVICE_MODE": "0",
        "TORCH_NEURONX_DISABLE_NEFF_CACHE": "0",
        "TORCH_NEURONX_NEFF_DISABLE_CACHE": "0",
        **COMPILER_FLAGS,
    }
    assert settings(Path("/model"), 1).items() >= SETTINGS.items()


def test_the_compilers_level_is_the_plans_while_compiling_and_in_every_rank(
    checkpoint, config, monkeypatch
) -> None:
    """It is in a tree's manifest and makes each model's origin; another target has none."""
    plans = {
        level: make_plan(checkpoint, config, TORCHNEURON.limits, opt_level=level)
        for level in (None, 1, 2, 3)
    }
    assert [plan.settings["opt_level"] for plan in plans.values()] == [2, 1, 2, 3]
    assert plans[1].model_settings("code2wav")["opt_level"] == 1
    assert "--opt-level 1" in plans[1].command(Path("tree"))
    for level in (1, 2, 3):
        variables = settings(Path("/rank"), plans[level].opt_level)
        assert variables["NEURON_COMPILER_OPT_LEVEL"] == f"-O{level}"
    with pytest.raises(OptionError, match="opt_level must be 2, 1 or 3 for target torchneuron, g"):
        make_plan(checkpoint, config, TORCHNEURON.limits, opt_level=4)
    for target in (CPU, NEURON):
        assert "opt_level" not in make_plan(checkpoint, config, target.limits).settings
        with pytest.raises(OptionError, match="opt_level must be left out for target"):
            make_plan(checkpoint, config, target.limits, opt_level=2)
    monkeypatch.setenv("NEURON_COMPILER_OPT_LEVEL", "-O1")
    with pytest.raises(OptionError, match=r"'-O1', .* '-O2'\. Unset it, and compile with --opt-l"):
        set_before_import(settings(Path("/rank"), 2))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("TORCH_NEURONX_RETAIN_DEVICE_MODE", "0"),
        ("NEURON_CC_FLAGS", "--model-type=transformer --auto-cast=none"),
    ],
)
def test_another_value_is_refused(monkeypatch, name, needed) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(OptionError, match=rf"{name} is '1', but .* needs '{needed}'\. Unset it"):
        set_before_import(SETTINGS)
    assert "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION" not in os.environ


def test_a_tree_of_other_compiler_flags_is_refused(checkpoint, config, tmp_path) -> None:
    """TorchNeuron would find none of its NEFFs: their names have the flags."""
    versions = TORCHNEURON.versions()
    assert versions.items() >= COMPILER_FLAGS.items()
    plan = make_plan(checkpoint, config, TORCHNEURON.limits)
    other = versions | {"NEURON_CC_FLAGS": "--auto-cast=all"}
    write_manifest(tmp_path, Manifest(fingerprint(checkpoint), plan.settings, other, {}))
    said = "compiled with NEURON_CC_FLAGS --auto-cast=all, but this machine has --model.*again: "
    with pytest.raises(ArtifactError, match=said):
        open_tree(tmp_path, checkpoint, config, {"torchneuron": TORCHNEURON}, {})


def test_settings_that_come_after_the_import_are_refused(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_neuronx", ModuleType("torch_neuronx"))
    with pytest.raises(OptionError, match=r"imported before .* TORCH_NEURONX_DISABLE_FALLBACK"):
        set_before_import(SETTINGS)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    set_before_import(SETTINGS)


def test_the_settings_are_made_before_torch_is_imported(tmp_path) -> None:
    """torch imports TorchNeuron by itself where it is installed.

    All that a compile writes is in the model's folder, where the next run finds what a killed one
    has left.
    """
    script = """
import os, sys
from pathlib import Path
from qwen3_omni_neuron.neuron.torchneuron.compile import compile_model

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"))
            for name in sys.argv[2:]:
                print(Path(os.environ[name]).relative_to(sys.argv[1]))
            raise SystemExit

assert "torch" not in sys.modules
sys.meta_path.insert(0, Finder())
plan = type("Plan", (), {"lnc": 2, "opt_level": 1})
compile_model(plan, "audio", Path(sys.argv[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *CACHES, LOCAL_CACHE_FOLDER],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["1", *CACHES.values(), "local"], done.stderr
