"""The part in C; all else about the package is in pyproject.toml."""

from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup

NATIVE = Path("src/qwen3_omni_neuron/cpu/native")
SOURCE_HASH = run_path(str(NATIVE / "sources.py"))["source_hash"](NATIVE)

setup(
    ext_modules=[
        Extension(
            "qwen3_omni_neuron.cpu.native._library",
            sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            define_macros=[("SOURCE_HASH", f'"{SOURCE_HASH}"')],
            extra_compile_args=["-O3", "-Wno-psabi", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,  # without a compiler torch does the same
        )
    ],
    # By time stamps alone a library of other sources may pass for new; a rebuild must rebuild.
    options={"build_ext": {"force": True}},
)
