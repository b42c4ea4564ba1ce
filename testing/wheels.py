"""Build the archives of a release: one of the sources, and a wheel for each platform.

    python -m testing.wheels dist          # of the commit that is checked out
    python -m testing.wheels --tag v0.2.0  # whether a tag names the version

The same commit gives the same bytes. It runs on Linux on x86-64, with gcc and with what
requirements/wheels.txt pins: zig links for other platforms and for a C library older than here.
"""

import argparse
import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from testing.imports import ROOT

LIBRARY = "qwen3_omni_neuron/cpu/native/_library.abi3.so"
BUILD_SDIST = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
BUILD_WHEEL = """
import sys
from setuptools import build_meta

options = {"--build-option": "--plat-name=" + sys.argv[2]}
build_meta.build_wheel(sys.argv[1], options)
"""


@dataclass(frozen=True)
class Platform:
    """A platform that has a wheel.

    name: as the wheel's file name has it. zig: the same platform in zig's words, with the oldest
    version of its C library. compiler: None where zig compiles, too.
    """

    name: str
    zig: str
    compiler: str | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables by which setuptools compiles and links for this platform."""
        zig = f"{sys.executable} -m ziglang cc -target {self.zig}"
        if self.compiler is None:
            return {"CC": zig, "LDSHARED": f"{zig} -shared -s"}
        # gcc's own library asks the processor which instructions it has.
        asked = [self.compiler, "-print-libgcc-file-name"]
        libgcc = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        return {"CC": self.compiler, "LDSHARED": f"{zig} -shared -s {libgcc}"}


# x86-64 by gcc: what zig 0.17 brings for __builtin_cpu_supports finds no instructions at all, so
# that its library would run the slowest kernels everywhere. Torch's wheels need glibc 2.28, too;
# macOS 11 is the first on arm64.
PLATFORMS = (
    Platform("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", compiler="gcc"),
    Platform("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28"),
    Platform("macosx_11_0_arm64", "aarch64-macos.11.0"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build into a folder, or compare a tag with the version. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("out", nargs="?", type=Path, help="folder for the archives")
    what.add_argument("--tag", help="a tag that must be v and the version")
    args = parser.parse_args(arguments)
    if args.tag is not None:
        if args.tag == f"v{PACKAGE_VERSION}":
            return 0
        sys.stderr.write(
            f"The tag is {args.tag} and the version {PACKAGE_VERSION}: set PACKAGE_VERSION in "
            f"compilation/versions.py, or tag the commit v{PACKAGE_VERSION}.\n"
        )
        return 1
    for archive in build(args.out):
        sys.stdout.write(f"{archive}\n")
    return 0


def build(out: Path, platforms: Sequence[Platform] = PLATFORMS) -> list[Path]:
    """Build the archives of the commit that is checked out, and return their paths.

    out: loses the archives of earlier builds. Raises RuntimeError where a wheel has no library, and
    subprocess.CalledProcessError where a tool fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("qwen3_omni_neuron-*.whl"), *out.glob("qwen3_omni_neuron-*.tar.gz")):
        old.unlink()
    seconds = int(subprocess.check_output(("git", "log", "-1", "--format=%ct"), cwd=ROOT))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        subprocess.run(["git", "archive", "-o", work / "tree.tar", "HEAD"], cwd=ROOT, check=True)
        with tarfile.open(work / "tree.tar") as tree:
            tree.extractall(work / "tree", filter="data")
        _run(BUILD_SDIST, work, cwd=work / "tree", seconds=seconds)
        (made,) = work.glob("*.tar.gz")
        sdist = out / made.name
        repack(made, sdist, seconds)
        archives = [sdist]
        # From the archive of the sources, as a wheel that pip builds, and each from a fresh copy: a
        # library that can't be compiled must not be one of another platform.
        for platform in platforms:
            with tarfile.open(sdist) as sources:
                sources.extractall(work / platform.name, filter="data")
            tree_of_platform = work / platform.name / sdist.name.removesuffix(".tar.gz")
            wheels = work / f"{platform.name}-wheel"
            wheels.mkdir()
            _run(
                BUILD_WHEEL,
                *(wheels, platform.name),
                cwd=tree_of_platform,
                seconds=seconds,
                **platform.environment(),
            )
            (wheel,) = wheels.iterdir()
            if LIBRARY not in zipfile.ZipFile(wheel).namelist():
                raise RuntimeError(
                    f"{wheel.name} has no C library: the compiler's message is above. "
                    "requirements/wheels.txt pins the compilers; gcc has to be on PATH."
                )
            archives.append(Path(shutil.move(wheel, out / wheel.name)))
    return archives


def repack(source: Path, target: Path, seconds: int) -> None:
    """Copy a .tar.gz, without what differs between two builds: times, owners, order, modes.

    seconds: the time of all files, since 1970.
    """
    with (
        tarfile.open(source) as old,
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=seconds) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)


def _run(script: str, *arguments: object, cwd: Path, seconds: int, **environment: str) -> None:
    """Run Python in a folder, with the time and the modes that files of archives have."""
    subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(seconds), **environment},
        umask=0o022,
        stdout=subprocess.DEVNULL,
        check=True,
    )


if __name__ == "__main__":
    sys.exit(main())
