"""The part in C; all else about the package is in pyproject.toml."""

import sys
from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/qwen3_omni_neuron/cpu/native")
SOURCE_DIGEST = run_path(str(NATIVE / "sources.py"))["source_digest"](NATIVE)


class BuildLibrary(build_ext):
    """Compiles the library, unless an earlier build has left that of the same sources."""

    def build_extension(self, ext: Extension) -> None:
        """Compile it where it is missing, or older than its sources.

        By time stamps alone a library of other sources may pass for new, so that one without
        their digest is removed; a compiler that fails can't leave it, either.
        """
        library = Path(self.get_ext_fullpath(ext.name))
        digest = SOURCE_DIGEST.to_bytes(8, sys.byteorder)
        if library.exists() and digest not in library.read_bytes():
            library.unlink()
        super().build_extension(ext)


class PlatformWheel(bdist_wheel):
    """A wheel for all versions of Python: its library uses nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, its ABI and the platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "qwen3_omni_neuron.cpu.native._library",
            sorted(map(str, NATIVE.glob("*.c"))),
            depends=["setup.py", *sorted(map(str, NATIVE.glob("*.h")))],
            define_macros=[("SOURCE_DIGEST", str(SOURCE_DIGEST))],
            # Without the -g that Python was built with: debug information is seven eighths of the
            # library, and takes a third of the time to compile it.
            extra_compile_args=["-O3", "-g0", "-Wno-psabi", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            py_limited_api=True,  # one name of the file for all versions of Python
            optional=True,  # without a compiler torch does the same
        )
    ],
    cffi_modules=[f"{NATIVE}/sources.py:declarations"],
    cmdclass={"bdist_wheel": PlatformWheel, "build_ext": BuildLibrary},
)
