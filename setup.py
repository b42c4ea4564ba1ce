"""The part in C; all else about the package is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/qwen3_omni_neuron/cpu/native")

setup(
    ext_modules=[
        Extension(
            "qwen3_omni_neuron.cpu.native._library",
            sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            extra_compile_args=["-O3", "-Wno-psabi"],
            libraries=["m"],
            optional=True,  # without a compiler torch does the same
        )
    ]
)
