"""Engines over NxDI's CPU mode, and the CPU engines that they are compared with."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from testing.neuron.cpu_mode import build_cpu_mode_engines
from testing.neuron.nxdi_sources import make_importable
from testing.specs import cpu_engines, engine_spec

BUCKETS = (48, 96)
DECODE_BUCKETS = (64, 128)
CONTEXT_LENGTH = 256
SLOTS = 3

BothEngines = tuple[Engines, Engines]


@pytest.fixture(scope="session")
def nxdi() -> Iterator[None]:
    """Skip, with the reason, where NxDI can't be imported: see make_importable."""
    reason = make_importable()
    if reason is not None:
        pytest.skip(reason)
    logging.getLogger("Neuron").setLevel(logging.ERROR)
    yield


@pytest.fixture(scope="session")
def prompt_builder(checkpoint: Path, config: OmniConfig) -> PromptBuilder:
    return PromptBuilder(checkpoint, config)


@pytest.fixture(scope="session")
def both_of(nxdi: None, checkpoint: Path) -> Callable[..., BothEngines]:
    """Return a function that makes engines of the CPU and of NxDI.

    changes: settings of their plan. config: replaces the checkpoint's config.
    """

    def make(
        of: Path = checkpoint, config: OmniConfig | None = None, **changes: Any
    ) -> BothEngines:
        spec = nxdi_spec(of, **changes)
        spec = spec if config is None else replace(spec, config=config)
        return cpu_engines(spec), build_cpu_mode_engines(spec)

    return make


def nxdi_spec(checkpoint: Path, **changes: Any) -> EngineSpec:
    """Return a spec. changes: settings of its plan."""
    settings = {
        "tp": 1,
        "max_concurrency": SLOTS,
        "context_length": CONTEXT_LENGTH,
        "prompt_buckets": BUCKETS,
        "decode_buckets": DECODE_BUCKETS,
        "patch_buckets": (64, 256),
    }
    return engine_spec(checkpoint, "neuron", **(settings | changes))


@pytest.fixture(scope="session")
def both_of_five(both_of: Callable[..., BothEngines]) -> BothEngines:
    """Five slots, with decode graphs of one, two, four and five rows."""
    return both_of(batches=(1, 2, 4), max_concurrency=5)


@pytest.fixture(scope="session")
def both(both_of: Callable[..., BothEngines]) -> BothEngines:
    """Three slots, three prompt buckets, three decode buckets."""
    return both_of()
