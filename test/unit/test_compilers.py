"""The C as it is installed, by other compilers and for another processor, against plain C."""

import shutil
import subprocess
from pathlib import Path

import pytest

from qwen3_omni_neuron.cpu.native import installed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "test-aarch64"
CHECK = ROOT / "test" / "native" / "check_kernels.c"
NATIVE = Path(installed.__file__).parent
NEEDED = {"clang": ["clang"], "aarch64-linux-gnu-gcc": ["aarch64-linux-gnu-gcc", "qemu-aarch64"]}


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler, so nothing in C")
def test_the_installed_library_equals_plain_c(tmp_path) -> None:
    """In double precision. The functions that are checked are among those that it exports."""
    library, program = installed.library_path(), tmp_path / "check_kernels"
    assert library is not None, "a compiler is there, and the library is not: pip install -e . -v"
    command = ["cc", "-O1", "-Wno-psabi", "-pthread", "-I", NATIVE, "-o", program, CHECK, library]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}", "-lm"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert ": passed" in done.stdout


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler, so nothing in C")
def test_rare_waits_cost_no_thread_and_frequent_ones_half(tmp_path) -> None:
    """The pool of parallel.c chooses how many work while other processes keep cores busy."""
    source, program = CHECK.with_name("check_threads.c"), tmp_path / "check_threads"
    subprocess.run(["cc", "-pthread", "-I", NATIVE, "-o", program, source], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler, so nothing in C")
def test_the_compiler_warns_of_nothing() -> None:
    flags = ["-fsyntax-only", "-Wall", "-Wextra", "-Wno-psabi", "-Werror", "-DSOURCE_DIGEST=0"]
    subprocess.run(["cc", *flags, *NATIVE.glob("*.c")], check=True)


@pytest.mark.parametrize("compiler", NEEDED)
def test_the_c_equals_plain_c(compiler) -> None:
    if missing := [name for name in NEEDED[compiler] if not shutil.which(name)]:
        pytest.skip(f"{missing[0]} is missing: the C by another compiler")
    done = subprocess.run(
        [SCRIPT, compiler], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert ": passed" in done.stdout
