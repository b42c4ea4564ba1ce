"""The package that tests import is the installed one, and has the files of this tree."""

import json
import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import qwen3_omni_neuron
from testing.imports import NAME, PACKAGE, ROOT
from testing.installed_package import differing, pytest_configure


def test_tests_import_the_installed_package() -> None:
    """A package that PYTHONPATH names comes first; an editable one is src."""
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    expected = next((path for folder in folders if (path := Path(folder, NAME)).is_dir()), None)
    if expected is None:
        installed = metadata.distribution(NAME)
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        editable = origin.get("dir_info", {}).get("editable", False)
        expected = PACKAGE if editable else Path(str(installed.locate_file(NAME)))
    assert Path(qwen3_omni_neuron.__path__[0]).samefile(expected)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of a part of the package, as if it were installed from it."""
    return Path(shutil.copytree(PACKAGE / "model", tmp_path / "model"))


def test_what_a_build_or_an_import_adds_is_no_difference(copied: Path) -> None:
    for name in ("_library.abi3.so", "_declarations.py", "__pycache__/layers.cpython-311.pyc"):
        (copied / name).parent.mkdir(exist_ok=True)
        (copied / name).write_bytes(b"made")
    assert differing(PACKAGE / "model", copied) == []


def test_files_that_were_changed_added_or_removed_since_are_named(copied: Path) -> None:
    (copied / "layers.py").write_text("changed", encoding="utf-8")
    (copied / "moe.py").unlink()
    (copied / "earlier.py").touch()
    assert differing(PACKAGE / "model", copied) == ["earlier.py", "layers.py", "moe.py"]


def test_tests_of_another_package_are_refused(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen3_omni_neuron, "__path__", [str(copied)])
    told = re.escape(f"the package that tests import, {copied}, differs from src in ")
    with pytest.raises(pytest.UsageError, match=told + r"\d+ files .* make \.venv/installed; or"):
        pytest_configure()


def commands(folder: Path, *variables: str) -> str:
    """Return what `make` would run to install the package into a folder."""
    environment = {n: v for n, v in os.environ.items() if n not in ("EDITABLE", "MAKEFLAGS")}
    command = ["make", "--dry-run", f"VENV={folder}", f"{folder}/installed", *variables]
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_make_installs_a_wheel_or_what_editable_asks_for_and_only_when_it_must(
    tmp_path: Path,
) -> None:
    page, library = (
        f"--what-if=src/qwen3_omni_neuron/{name}"
        for name in ("serving/page/main.js", "cpu/native/wave.c")
    )
    wheel, editable = "-c requirements/newest.txt  '.[", "-c requirements/newest.txt --editable '.["
    assert wheel in commands(tmp_path)
    (tmp_path / "installed").write_text("\n")
    assert "is up to date" in commands(tmp_path)
    assert wheel in commands(tmp_path, page)
    assert wheel in commands(tmp_path, library)
    assert editable in commands(tmp_path, "EDITABLE=1")
    (tmp_path / "installed").write_text("1\n")
    assert "is up to date" in commands(tmp_path, "EDITABLE=1")
    assert "is up to date" in commands(tmp_path, "EDITABLE=1", page)
    assert editable in commands(tmp_path, "EDITABLE=1", library)
    assert wheel in commands(tmp_path)
