"""The archives of a release: `make wheels` builds and judges them, in an environment of its own."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from testing import wheels
from testing.imports import ROOT

pytestmark = pytest.mark.skipif(
    "TEST_WHEELS" not in os.environ, reason="takes compilers for other platforms"
)
# How a library begins: ELF of 64 bits (x86-64 is machine 62, AArch64 is 183) and Mach-O of 64 bits.
MAGIC = {
    "manylinux_2_28_x86_64": (b"\x7fELF\x02", slice(18, 20), (62).to_bytes(2, "little")),
    "manylinux_2_28_aarch64": (b"\x7fELF\x02", slice(18, 20), (183).to_bytes(2, "little")),
    "macosx_11_0_arm64": (b"\xcf\xfa\xed\xfe", slice(4, 8), (0x0100000C).to_bytes(4, "little")),
}
PLATFORMS = [platform.name for platform in wheels.PLATFORMS]
LINUX = [name for name in PLATFORMS if name.startswith("manylinux")]
NAME = "qwen3-omni-neuron"
PACKAGE = f"qwen3_omni_neuron-{PACKAGE_VERSION}"
# What a processor must have for each kind of kernels, in the words of /proc/cpuinfo.
INSTRUCTIONS = {
    "_vnni_avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "_avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "_avx2": {"avx2", "fma"},
    "_plain": set(),
}
KINDS = """
import ctypes, sys
from qwen3_omni_neuron.cpu.native.installed import library_path

library = ctypes.CDLL(str(library_path()))
chosen = ctypes.POINTER(ctypes.c_char_p).in_dll(library, "kernels").contents.value.decode()
print(chosen, *(name for name in sys.argv[1:] if library.use_kernels(name.encode())))
"""
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

VERDICT = """
import sys
from qwen3_omni_neuron.cpu.native.installed import library_verdict

print("%d.%d" % sys.version_info[:2], library_verdict())
"""


@pytest.fixture(scope="module")
def dist() -> Path:
    """The folder that `make wheels` has built into."""
    return Path(os.environ["TEST_WHEELS"]).resolve()


def wheel_for(dist: Path, platform: str) -> Path:
    return dist / f"{PACKAGE}-py3-none-{platform}.whl"


def contents(sdist: Path) -> dict[str, bytes]:
    """The package's files in the archive of the sources, by their names in a wheel."""
    start = f"{PACKAGE}/src/"
    with tarfile.open(sdist) as archive:
        return {
            member.name.removeprefix(start): file.read()
            for member in archive.getmembers()
            if member.name.startswith(f"{start}qwen3_omni_neuron/")
            and (file := archive.extractfile(member)) is not None
        }


def test_there_is_one_archive_for_each_platform_and_one_of_the_sources(dist) -> None:
    expected = {f"{PACKAGE}.tar.gz", *(wheel_for(dist, name).name for name in PLATFORMS)}
    assert {file.name for file in dist.iterdir()} == expected


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_wheel_is_the_package_of_the_commit_with_its_library(dist, platform) -> None:
    """Every Python takes it. Beside the sources it has what the build makes, and nothing more."""
    wheel = wheel_for(dist, platform)
    assert {str(tag) for tag in parse_wheel_filename(wheel.name)[3]} == {f"py3-none-{platform}"}
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    package = {name: data for name, data in files.items() if ".dist-info/" not in name}
    library = package.pop(wheels.LIBRARY)
    package.pop("qwen3_omni_neuron/cpu/native/_declarations.py")
    assert package == contents(dist / f"{PACKAGE}.tar.gz")
    listed = subprocess.run(
        ["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert package.keys() == {name.removeprefix("src/") for name in listed.stdout.split()}
    start, place, machine = MAGIC[platform]
    assert library.startswith(start)
    assert library[place] == machine
    kinds = INSTRUCTIONS if platform.endswith("x86_64") else ["_plain"]
    for kind in kinds:
        assert f"{kind}\0".encode() in library


@pytest.mark.parametrize("platform", LINUX)
def test_a_wheel_asks_for_no_newer_c_library_than_its_name_says(dist, platform) -> None:
    """auditwheel's verdict: the symbols are of glibc 2.28 or older, and it needs nothing else."""
    shown = judged("auditwheel", "show", wheel_for(dist, platform))
    found = re.search(r'platform tag:\s+"manylinux_2_(\d+)_(\w+)"', shown)
    assert found, shown
    assert int(found[1]) <= 28
    assert platform.endswith(found[2])


def test_an_index_takes_the_archives(dist) -> None:
    """twine's verdict, without a warning."""
    shown = judged("twine", "check", "--strict", *sorted(dist.iterdir()))
    assert shown.count("PASSED") == 1 + len(PLATFORMS), shown


def judged(tool: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", tool, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "1000"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_another_build_gives_the_same_bytes(dist, tmp_path, monkeypatch) -> None:
    """In another folder, and with nothing that zig remembers of the first one."""
    monkeypatch.setenv("ZIG_LOCAL_CACHE_DIR", str(tmp_path / "zig"))
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(tmp_path / "zig"))
    again = wheels.build(tmp_path / "again")
    assert {file.name: digest(file) for file in again} == {
        file.name: digest(file) for file in dist.iterdir()
    }


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory) -> Callable[..., str]:
    """Run a program of an environment with the wheel, without a compiler on PATH."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    environment["PATH"] = str(venv / "bin")

    def run(*command: object) -> str:
        program = [str(venv / "bin" / str(command[0])), *map(str, command[1:])]
        done = subprocess.run(
            program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    # pip as its user calls it: it chooses the wheel by the tags of this Python.
    run("python", "-m", "pip", "install", "--no-index", "--no-deps", "--find-links", dist, NAME)
    # What the package needs is in the environment of this process.
    (packages,) = venv.glob("lib/python*/site-packages")
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "needed.pth").write_text(line)
    where = run("python", "-c", "import qwen3_omni_neuron as package; print(package.__file__)")
    assert Path(where.strip()).is_relative_to(venv)
    return run


def test_an_installed_wheel_answers_in_c_without_a_compiler(installed, tmp_path) -> None:
    assert "| steps in C | compiled |" in installed("qwen3-omni-neuron", "doctor").splitlines()
    spoken = tmp_path / "spoken.wav"
    answer = installed(
        *("qwen3-omni-neuron", "speak", "--audio", ROOT / "examples/sum.wav", "--out", spoken)
    )
    assert "eight" in answer
    assert spoken.stat().st_size > 10_000


def test_an_installed_wheel_takes_the_kernels_of_the_processor(installed) -> None:
    """The first of them that Linux says this processor can run; and each."""
    has = set(Path("/proc/cpuinfo").read_text().split())
    runnable = [kind for kind, needs in INSTRUCTIONS.items() if needs <= has]
    assert installed("python", "-c", KINDS, *INSTRUCTIONS).split() == [runnable[0], *runnable]


def test_the_tests_of_the_c_pass_over_an_installed_wheel(installed) -> None:
    """Those that compile another library have no compiler here, and are skipped."""
    files = sorted(ROOT.glob("test/unit/test_native_*.py"))
    assert files
    shown = installed("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert re.search(r"^\d+ passed", shown, re.MULTILINE), shown


@pytest.mark.parametrize("version", PYTHONS)
def test_a_python_takes_the_wheel_and_loads_its_library(version, dist, tmp_path) -> None:
    """Without torch, whose wheels from PyPI take 5 GB for each Python."""
    venv = tmp_path / "venv"
    subprocess.run([python_of(version), "-m", "venv", venv], check=True)
    install = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
    subprocess.run([*install, "cffi"], check=True)
    subprocess.run([*install, "--no-index", "--no-deps", "--find-links", dist, NAME], check=True)
    shown = subprocess.run(
        [venv / "bin/python", "-I", "-c", VERDICT], check=True, capture_output=True, text=True
    )
    assert shown.stdout == f"{version} compiled\n"


def python_of(version: str) -> str:
    """An interpreter on PATH or of pyenv; without one the test is skipped."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for found in filter(None, [shutil.which(f"python{version}"), *map(str, of_pyenv)]):
        # pyenv has a command on PATH for versions that are switched off, too.
        if subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    pytest.skip(f"there is no Python {version}, which would load the wheel's library")
