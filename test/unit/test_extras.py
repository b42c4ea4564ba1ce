"""The extras of pyproject.toml: pip finds versions that all of them take together."""

import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from qwen3_omni_neuron.compilation.versions import PACKAGE
from testing.imports import ROOT

# Its packages are in another repository, and it pins the transformers that train/ can't use.
APART = "neuron"


def test_an_error_names_a_command_that_needs_this_package_on_no_index() -> None:
    """From a checkout or a wheel, pip takes what is installed and fetches the extra's packages."""
    wanted = f"{PACKAGE}[serve]"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--dry-run"]
    done = subprocess.run([*command, wanted], check=False, capture_output=True, text=True)
    assert f"Requirement already satisfied: {wanted}" in done.stdout, done.stderr


def test_all_extras_resolve_together() -> None:
    """Packages that are installed stay where they fit, so that little is fetched."""
    if not os.environ.get("TEST_EXTRAS"):
        pytest.skip("pip asks a registry for two minutes, which make test-extras lets it do")
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib, and no smart-turn")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(r for n in extras if n != APART for r in extras[n])]
    wanted = [text for text in wanted if Requirement(text).name != project["name"]]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", *wanted]
    made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert made.returncode == 0, made.stderr[-2000:]
