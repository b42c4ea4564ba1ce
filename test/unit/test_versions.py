"""Versions: one place each, and what counts as supported."""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from qwen3_omni_neuron.neuron import versions
from qwen3_omni_neuron.neuron.versions import is_supported, supported_neuron

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
BUILD_SCRIPT = """
import sys
from setuptools import build_meta

build_meta.prepare_metadata_for_build_wheel(sys.argv[1])
print(sorted({"torch", "transformers", "qwen3_omni_neuron"} & set(sys.modules)))
"""


def built_metadata(folder: Path, pyproject: str) -> metadata.Distribution:
    """The metadata of a wheel of the package, made where torch can't be imported."""
    project, out = folder / "project", folder / "metadata"
    out.mkdir()
    sources = project / "src" / "qwen3_omni_neuron"
    shutil.copytree(
        ROOT / "src" / "qwen3_omni_neuron",
        sources,
        ignore=lambda folder, names: [
            n
            for n in names
            if not (Path(folder) / n).is_dir() and not n.endswith((".py", ".c", ".h"))
        ],
    )
    for name in ("README.md", "LICENSE", "setup.py"):
        shutil.copy(ROOT / name, project)
    (project / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    (project / "torch.py").write_text("raise ImportError('no torch here')", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", BUILD_SCRIPT, str(out)],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    (found,) = out.glob("*.dist-info")
    return metadata.Distribution.at(found)


def test_the_package_has_one_version(tmp_path) -> None:
    assert not re.search(r"^version = \"", PYPROJECT, re.MULTILINE)
    assert built_metadata(tmp_path, PYPROJECT).version == PACKAGE_VERSION


def test_the_supported_versions_are_those_of_the_neuron_extra() -> None:
    extra = re.search(r"^neuron = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert extra
    pinned = dict(re.findall(r'"([\w-]+)==([\d.*]+)', extra[1]))
    assert len(pinned) == 5
    assert pinned.items() <= supported_neuron().items()


def test_what_counts_as_supported() -> None:
    for version, supported, expected in (
        ("2.26.1234.5+abc", "2.26.*", True),
        ("2.9.0.2.15.30+f1", "2.9.0.2.15.*", True),
        ("2.27.1", "2.26.*", False),
        ("0.5.0", "0.5.0", True),
        ("0.5.01", "0.5.0", False),
        ("3.12.3", "3.11, 3.12, 3.13", True),
        ("3.1.2", "3.11, 3.12, 3.13", False),
    ):
        assert is_supported(version, supported) is expected


def test_another_version_of_torchneuron_is_named(monkeypatch, caplog) -> None:
    here = {"torch": "2.13.0", "torch-neuronx": "2.12.1.0", "python": "3.12.3"}
    monkeypatch.setattr(versions, "installed_version", here.get)
    versions.require_torchneuron()
    (record,) = caplog.records
    said = "the Neuron SDK 2.33, but found torch-neuronx 2.12.1.0 (supported: 2.13.3.*, 2.14.3.*)"
    assert said in record.getMessage()
    caplog.clear()
    here["torch-neuronx"] = "2.13.3.0"
    versions.require_torchneuron()
    assert not caplog.records
