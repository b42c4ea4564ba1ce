"""Tiny checkpoints and the models over them, made once a run."""

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni, api
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.engines.process.heap import keep_all
from qwen3_omni_neuron.model.config import OmniConfig
from testing.models import load_models
from testing.repeats import examples
from testing.simulation import Simulation
from testing.subprocesses import wait_until
from testing.tiny import write_tiny_checkpoint

if TYPE_CHECKING:
    from openai import OpenAI

    from qwen3_omni_neuron.serving.server import Server
    from qwen3_omni_neuron.verification.oracle import Reference
    from testing.realtime import Caller
    from train.judge import Judge

# The engines of test/neuron, which can't have a conftest of its own beside this one; what a run
# leaves out, what it says at its end, and how its processes start.
pytest_plugins = [
    "testing.installed_package",
    "testing.neuron.nxdi_engines",
    "testing.native_library",
    "testing.repeats",
    "testing.not_run",
    "testing.warm_starts",
]

# Properties are shown by the same examples in every run. The profile "search" looks for others.
settings.register_profile(
    "same", derandomize=True, deadline=None, database=None, max_examples=examples(100)
)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("same")

# Tiny matrices: a second thread costs more than it gives, and far more beside busy stages.
torch.set_num_threads(1)


CheckpointMaker = Callable[[int], Path]
BothMaker = Callable[[int], tuple[Qwen3Omni, "Reference"]]


def pytest_collection_finish() -> None:
    """Lets the garbage collector pass over a million objects of modules, in every test."""
    keep_all()


@pytest.fixture(scope="module", autouse=True)
def cores_of_a_module() -> Iterator[None]:
    """Puts back the variables by which a load in this process takes its cores."""
    names = ("NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The event loop of tests that are coroutines, marked anyio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def seeds_of_a_test(request, monkeypatch) -> None:
    """Lets requests without a seed draw the same in every run of a test: some draw the end at once.

    Those of other processes draw at random still.
    """
    seeds = random.Random(request.node.nodeid)
    monkeypatch.setattr(api, "secrets", SimpleNamespace(randbits=seeds.getrandbits))


@pytest.fixture(scope="session")
def judge() -> "Judge":
    from train.judge import Judge  # librosa, which not every environment of these tests has

    return Judge()


@pytest.fixture(scope="session")
def checkpoint_of_seed(tmp_path_factory) -> CheckpointMaker:
    """A tiny checkpoint by its seed."""
    made: dict[int, Path] = {}

    def make(seed: int) -> Path:
        if seed not in made:
            made[seed] = write_tiny_checkpoint(tmp_path_factory.mktemp(f"seed{seed}"), seed)
        return made[seed]

    return make


@pytest.fixture(scope="session")
def omni_of_seed(checkpoint_of_seed) -> Iterator[Callable[[int], Qwen3Omni]]:
    """Ours over a tiny checkpoint, in float32, by its seed."""
    made: dict[int, Qwen3Omni] = {}

    def make(seed: int) -> Qwen3Omni:
        if seed not in made:
            folder = checkpoint_of_seed(seed)
            made[seed] = Qwen3Omni.load(folder, dtype="float32", max_concurrency=3)
        return made[seed]

    yield make
    for omni in made.values():
        omni.close()


@pytest.fixture(scope="session")
def both_of_seed(checkpoint_of_seed, omni_of_seed) -> BothMaker:
    """Ours and the oracle over one tiny checkpoint, in float32, by its seed."""
    # Of transformers, which takes seconds: pytest-xdist's own process runs no test.
    from qwen3_omni_neuron.verification.oracle import Reference

    made: dict[int, Reference] = {}

    def make(seed: int) -> tuple[Qwen3Omni, Reference]:
        if seed not in made:
            made[seed] = Reference(checkpoint_of_seed(seed))
        return omni_of_seed(seed), made[seed]

    return make


@pytest.fixture(scope="session")
def checkpoint(checkpoint_of_seed) -> Path:
    return checkpoint_of_seed(1)


@pytest.fixture(scope="session")
def config(checkpoint) -> OmniConfig:
    return read_config(checkpoint)


@pytest.fixture(scope="session")
def models(checkpoint, config) -> Models:
    """Our modules in float32."""
    return load_models(Checkpoint(checkpoint), config, torch.float32)


@pytest.fixture(scope="session")
def reference(both_of_seed) -> "Reference":
    """The oracle in float32."""
    return both_of_seed(1)[1]


@pytest.fixture(scope="session")
def omni(omni_of_seed) -> Qwen3Omni:
    """Ours in float32, with three slots."""
    return omni_of_seed(1)


@pytest.fixture(scope="session")
def speaking() -> Iterator[Qwen3Omni]:
    """The checkpoint that ships, with three slots."""
    with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=3) as omni:
        yield omni


@pytest.fixture
def slow_steps(omni, monkeypatch) -> None:
    """Makes each step of `omni` 3 ms longer: a long reply still runs when a busy machine looks."""
    engines = omni._pipeline._engines
    for engine in (engines.thinker, engines.talker):
        monkeypatch.setattr(engine, "step", partial(_slow_step, engine.step))


def _slow_step(step: Callable[..., Any], *arguments: Any) -> Any:
    time.sleep(0.003)
    return step(*arguments)


@pytest.fixture(scope="session")
def bare(checkpoint) -> Iterator[Qwen3Omni]:
    """Ours as `omni`, without the prefix cache: a test may call engines past the runtime."""
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=3, reuse=False) as omni:
        yield omni


# Imported by those alone who use them: some environments have no server and no client.


@pytest.fixture(scope="module")
def server(omni) -> "Iterator[Server]":
    """A server over `omni`, with the settings that it has by default."""
    from testing.http_server import serving

    with serving(omni) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> "Iterator[OpenAI]":
    """OpenAI's client of the module's server."""
    from testing.http_server import client_of

    with client_of(server) as made:
        yield made


@pytest.fixture
def caller(server) -> "Iterator[Caller]":
    """A session that is pushed to talk, at 16 kHz, with short replies."""
    from testing.realtime import PUSH_TO_TALK, SHORT, calling

    with calling(server) as made:
        made.update(audio=PUSH_TO_TALK, **SHORT)
        yield made


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def nothing_is_left(omni) -> Iterator[None]:
    """Checks that a test has left all slots of `omni` free."""
    yield
    wait_until(lambda: not omni.status().running and not omni.status().queued)


@pytest.fixture
def simulate(config) -> Iterator[Callable[..., Simulation]]:
    """Makes simulations, and closes them."""
    made: list[Simulation] = []

    def make(*args: Any, **kwargs: Any) -> Simulation:
        made.append(Simulation(config, *args, **kwargs))
        return made[-1]

    yield make
    for simulation in made:
        simulation.pipeline.close()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """240 kB: three models of six of a tree of testing.made_trees."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=240k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
