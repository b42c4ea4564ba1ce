"""The part in C; all else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "qwen3_omni_neuron.cpu.native._predictor",
            ["src/qwen3_omni_neuron/cpu/native/predictor.c"],
            extra_compile_args=["-O3"],
            libraries=["m"],
            optional=True,  # without a compiler torch does the same
        )
    ]
)
