"""The package that tests import is the installed one, and has the files of this tree."""

import json
import os
import subprocess
from importlib import metadata
from pathlib import Path

import qwen3_omni_neuron
from testing.imports import NAME, PACKAGE, ROOT


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


def commands(folder: Path, *variables: str) -> str:
    """Return what `make` would run to install the package into a folder."""
    environment = {n: v for n, v in os.environ.items() if n not in ("EDITABLE", "MAKEFLAGS")}
    command = ["make", "--dry-run", f"VENV={folder}", f"{folder}/installed", *variables]
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_make_installs_a_wheel_or_what_editable_asks_for_and_only_when_it_must(tmp_path) -> None:
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
