"""Every released width: replies equal the reference's, and loading takes little memory.

The checkpoint has 2.7 G parameters, 5.4 GB: `make test-wide`, with 20 GB of memory.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.subprocesses import run_python
from testing.tiny import write_tiny_checkpoint
from testing.wide import CASES, FRAMES, TOKENS

pytestmark = pytest.mark.skipif(
    "TEST_WIDE" not in os.environ, reason="takes 17 GB of disk and 20 GB of memory"
)
TIMEOUT_S = 1800


@pytest.fixture(scope="module")
def wide() -> Iterator[Path]:
    """The checkpoint; pytest's own temporary folders would stay for three runs."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_checkpoint(folder, size="wide")
        yield Path(folder)


@pytest.fixture(scope="module")
def theirs(wide) -> dict[str, Any]:
    return run("theirs", "float32", wide, *CASES)


def run(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(run_python("-m", "testing.wide", *arguments, timeout_s=TIMEOUT_S)))


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for case, (tokens, codes) in theirs["replies"].items():
        assert (len(tokens), len(codes)) == (TOKENS, FRAMES), case
        assert ours["replies"][case][0] == tokens, f"{case}: tokens"
        assert ours["replies"][case][1] == codes, f"{case}: codes"


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_replies_are_the_references(wide, theirs, dtype) -> None:
    assert_same(run("ours", dtype, wide, *CASES), theirs)


def test_loading_takes_at_most_a_fifth_more_than_the_checkpoint(wide) -> None:
    checkpoint_bytes = sum(file.stat().st_size for file in wide.glob("*.safetensors"))
    load_bytes = run("ours", "auto", wide)["load_bytes"]
    assert load_bytes <= 1.2 * checkpoint_bytes, f"{load_bytes / checkpoint_bytes:.2f} times"
