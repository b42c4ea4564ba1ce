"""Versions: one place each, and what counts as supported."""

import re
from pathlib import Path

import pytest

from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION, SUPPORTED_NEURON, is_supported

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_package_has_one_version() -> None:
    """pyproject.toml reads it from the source, where it is a literal."""
    attr = re.search(r'^version = { attr = "([\w.]+)[.](\w+)" }$', PYPROJECT, re.MULTILINE)
    assert attr
    assert '\ndynamic = ["version"]\n' in PYPROJECT
    source = (ROOT / "src" / Path(*attr[1].split("."))).with_suffix(".py").read_text("utf-8")
    assert f'\n{attr[2]} = "{PACKAGE_VERSION}"\n' in source


def test_the_supported_versions_are_those_of_the_neuron_extra() -> None:
    extra = re.search(r"^neuron = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert extra
    pinned = dict(re.findall(r'"([\w-]+)==([\d.*]+)', extra[1]))
    assert len(pinned) == 5
    assert pinned.items() <= SUPPORTED_NEURON.items()


@pytest.mark.parametrize(
    ("version", "supported", "expected"),
    [
        ("2.26.1234.5+abc", "2.26.*", True),
        ("2.9.0.2.15.30+f1", "2.9.0.2.15.*", True),
        ("2.27.1", "2.26.*", False),
        ("0.5.0", "0.5.0", True),
        ("0.5.01", "0.5.0", False),
        ("3.12.3", "3.11, 3.12, 3.13", True),
        ("3.1.2", "3.11, 3.12, 3.13", False),
    ],
)
def test_what_counts_as_supported(version: str, supported: str, expected: bool) -> None:
    assert is_supported(version, supported) is expected
