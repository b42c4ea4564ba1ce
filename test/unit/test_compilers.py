"""Kernels in C by other compilers and for another processor, against C in double precision."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "test-aarch64"
NEEDED = {
    "gcc": ["gcc"],
    "clang": ["clang"],
    "aarch64-linux-gnu-gcc": ["aarch64-linux-gnu-gcc", "qemu-aarch64"],
}


@pytest.mark.parametrize("compiler", NEEDED)
def test_the_c_equals_plain_c(compiler: str) -> None:
    if missing := [name for name in NEEDED[compiler] if not shutil.which(name)]:
        pytest.skip(f"{missing[0]} is missing: the C by another compiler")
    done = subprocess.run(
        [SCRIPT, compiler], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert ": passed" in done.stdout
