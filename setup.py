"""The part in C; all else about the package is in pyproject.toml."""

from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup

NATIVE = Path("src/qwen3_omni_neuron/cpu/native")
SOURCE_DIGEST = run_path(str(NATIVE / "sources.py"))["source_digest"](NATIVE)

setup(
    ext_modules=[
        Extension(
            "qwen3_omni_neuron.cpu.native._library",
            sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            define_macros=[("SOURCE_DIGEST", str(SOURCE_DIGEST))],
            extra_compile_args=["-O3", "-Wno-psabi", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            py_limited_api=True,  # it uses nothing of Python: one library for all versions
            optional=True,  # without a compiler torch does the same
        )
    ],
    cffi_modules=[f"{NATIVE}/sources.py:declarations"],
    # By time stamps alone a library of other sources may pass for new; a rebuild must rebuild.
    options={"build_ext": {"force": True}, "bdist_wheel": {"py_limited_api": "cp310"}},
)
