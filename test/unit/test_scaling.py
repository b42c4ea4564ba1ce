"""Autoscaling by predicted time to first audio: the policy, and a replica's figures for it."""

import math
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram

from qwen3_omni_neuron.serving.fleet.scaling import (
    SHRINK_MARGIN,
    WINDOW_S,
    FirstAudioPolicy,
    FleetLoad,
    ReplicaFigures,
    load_of,
    replicas_wanted,
)

IDLE = FleetLoad(0, 4, 12.0, 0.8)
BUSY = replace(IDLE, requests=100)
seconds = st.floats(0.01, 60)
loads = st.builds(
    FleetLoad, st.floats(0, 5000), st.integers(1, 16), seconds, seconds | st.just(math.inf)
)


def predicted_s(load: FleetLoad, replicas: int) -> float:
    """Return the time to first audio of a request that comes at a busy moment."""
    slots = load.slots * replicas
    if not slots:
        return math.inf
    return load.first_audio_s + max(0.0, load.peak - slots) * load.service_s / slots


@given(loads, st.floats(0.01, 30))
def test_as_few_replicas_as_meet_the_target(load, target_s) -> None:
    needed = load.needed(target_s)
    if load.first_audio_s <= target_s and needed:
        assert predicted_s(load, needed) <= target_s * (1 + 1e-6)
        assert predicted_s(load, needed - 1) > target_s * (1 - 1e-6)
    elif load.first_audio_s > target_s:
        assert needed == math.ceil(load.peak / load.slots - 1e-9)


@given(loads, st.lists(st.floats(1, SHRINK_MARGIN), max_size=20), st.integers(0, 500))
def test_a_load_that_goes_up_and_down_a_little_does_not_flap(load, factors, replicas) -> None:
    sizes = [replicas_wanted(load, replicas, 2.0, 1)]
    for factor in factors:
        now = replace(load, requests=load.requests * factor)
        sizes.append(replicas_wanted(now, sizes[-1], 2.0, 1))
    assert sizes == sorted(sizes)


def context(figures: Any, queued: float = 0.0, target: int = 7) -> Any:
    return SimpleNamespace(
        aggregated_metrics=figures, total_queued_requests=queued, target_num_replicas=target
    )


def test_the_policy_reads_rays_context() -> None:
    figures = {
        "slots": {"a": 4.0, "b": 4.0},
        "requests": {"a": 4.0, "b": 10.0},
        "replies_per_s": {"a": 1.0, "b": 1.5},
        "service_s": {"a": 5.0, "b": 7.0},
        "at_once": {"a": 2.0, "b": 2.0},
        "first_audio_s": {"a": 0.4},
        "RUNNING_REQUESTS_KEY": {"a": 90.0},  # Ray's own, with idle sockets
    }
    policy = pickle.loads(pickle.dumps(FirstAudioPolicy(target_s=2.0, spare=0)))
    # With four at once instead of two each takes twice as long.
    assert load_of(figures, 0.0, gain=1.0) == FleetLoad(2.5 * 12.0, 4.0, 12.0, 0.8)
    assert load_of(figures, 0.0, gain=4.0) == FleetLoad(2.5 * 6.0, 4.0, 6.0, 0.4)
    assert load_of(figures, 86.0, gain=1.0) == BUSY  # more waits than is answered
    assert policy(context(figures, 86.0)) == (BUSY.needed(2.0), {})


@given(st.floats(0.1, 8), st.integers(2, 8), st.floats(0.2, 8))
def test_the_same_load_wants_the_same_replicas_however_many_have_it(
    replies_per_s, slots, gain
) -> None:
    each = (slots / gain - 1) / (slots - 1)

    def wanted(at_once: float) -> int:
        times = {"service_s": 3 * (1 + (at_once - 1) * each), "first_audio_s": 0.0}
        figures = {"slots": slots, "replies_per_s": replies_per_s, "at_once": at_once, **times}
        load = load_of({name: {"a": value} for name, value in figures.items()}, 0.0, gain)
        return load.needed(1.0)

    assert wanted(1.0) == wanted(slots / 2) == wanted(slots)


class Replica:
    """Registry of a replica whose figures a test sets."""

    def __init__(self) -> None:
        self.registry, self.now = CollectorRegistry(), 0.0
        names = ("slots", "slots_used", "queue_length")
        self._gauges = [Gauge(f"qwen3_omni_{n}", n, registry=self.registry) for n in names]
        self.queued, self.ttfb = (
            Histogram(f"qwen3_omni_{n}_seconds", n, registry=self.registry)
            for n in ("queued", "ttfb")
        )
        self.figures = ReplicaFigures(self.registry, now=lambda: self.now)

    def read(self, now: float, used: float, queued: float = 0.0) -> dict[str, float]:
        self.now = now
        for gauge, value in zip(self._gauges, (4.0, used, queued), strict=True):
            gauge.set(value)
        return self.figures.read()


def test_a_replica_reports_its_recent_times() -> None:
    replica = Replica()
    assert replica.read(0.0, 2, 3) == {"slots": 4.0, "requests": 5.0, "replies_per_s": 0.0}
    for _ in range(5):
        replica.queued.observe(0.5)
        replica.ttfb.observe(1.25)
    found = replica.read(10.0, 2)  # 2 slots for 10 s: 5 replies of 4 s
    assert found == {
        "slots": 4.0,
        "requests": 2.0,
        "replies_per_s": 0.5,
        "service_s": 4.0,
        "at_once": 2.0,
        "first_audio_s": 0.75,
    }
    found = replica.read(10.0 + WINDOW_S, 0)
    assert found["replies_per_s"] == 0 and found["service_s"] == 4.0  # what it was
    replica.queued.observe(0.0)
    found = replica.read(20.0 + WINDOW_S, 3)  # the earlier ones count no more
    assert found["service_s"] == 30.0 and found["first_audio_s"] == 0.75
    assert found["at_once"] == 3.0 and found["replies_per_s"] == 1 / (10 + WINDOW_S)
