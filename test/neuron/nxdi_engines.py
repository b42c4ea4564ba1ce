"""Engines over NxDI's CPU mode, and the CPU engines that they are held against."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdi_sources import make_importable
from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.conversation import Conversation
from qwen3_omni_neuron.cpu.load import EngineSpec, build_engines
from qwen3_omni_neuron.neuron.load import NeuronSpec, build_cpu_mode_engines
from qwen3_omni_neuron.runtime.protocols import Engines

BUCKETS = (48, 96)
DECODE_BUCKETS = (64, 128)
CONTEXT_LENGTH = 256
SLOTS = 3

BothEngines = tuple[Engines, Engines]


@pytest.fixture(scope="session")
def nxdi() -> Iterator[None]:
    """Skips, with the reason, where NxDI can't be imported: see nxdi_sources."""
    reason = make_importable()
    if reason is not None:
        pytest.skip(reason)
    logging.getLogger("Neuron").setLevel(logging.ERROR)
    yield


@pytest.fixture(scope="session")
def conversation(checkpoint: Path, config: OmniConfig) -> Conversation:
    return Conversation(checkpoint, config)


@pytest.fixture(scope="session")
def spec(checkpoint: Path, config: OmniConfig, conversation: Conversation) -> NeuronSpec:
    engine = EngineSpec(
        checkpoint,
        config,
        torch.float32,
        conversation.newline_id,
        SLOTS,
        CONTEXT_LENGTH,
        BUCKETS,
    )
    return NeuronSpec(engine, 1, DECODE_BUCKETS)


@pytest.fixture(scope="session")
def both_of(nxdi: None, spec: NeuronSpec) -> Callable[..., BothEngines]:
    """Makes engines of the CPU and of NxDI, with fields of the engine's spec replaced. batches: of
    NeuronSpec."""

    def make(batches: tuple[int, ...] = (), **changes: Any) -> BothEngines:
        changed = replace(spec, batches=batches, engine=replace(spec.engine, **changes))
        return build_engines(changed.engine), build_cpu_mode_engines(changed)

    return make


@pytest.fixture(scope="session")
def both_of_five(both_of: Callable[..., BothEngines]) -> BothEngines:
    """Five slots, with decode graphs of one, two, four and five rows."""
    return both_of(batches=(1, 2, 4, 5), slots=5)


@pytest.fixture(scope="session")
def both(both_of: Callable[..., BothEngines]) -> BothEngines:
    """Three slots, three prompt buckets, three decode buckets."""
    return both_of()
