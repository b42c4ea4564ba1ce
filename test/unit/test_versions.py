"""Versions: one place each, and what counts as supported."""

import re
from pathlib import Path

import pytest

from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION, SUPPORTED_NEURON, is_supported

PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")


def test_the_package_has_one_version() -> None:
    assert f'\nversion = "{PACKAGE_VERSION}"\n' in PYPROJECT


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
