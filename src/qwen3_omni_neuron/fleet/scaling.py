"""Autoscaling by the predicted time to first audio: queue x service time over all slots.

A YAML of Ray Serve names the policy in its `autoscaling_config`:

    policy:
      policy_function: qwen3_omni_neuron.fleet.scaling:FirstAudioPolicy
      policy_kwargs: {target_s: 2.0, spare: 1}

Bounds and delays (`min_replicas`, `max_replicas`, `upscale_delay_s`, `downscale_delay_s`) stay
Ray's. Open realtime sockets are requests to Ray; here only what has a slot or waits for one counts.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

WINDOW_S = 60.0
PEAK = 2.0  # standard deviations: what 98 % of moments stay below
SHRINK_MARGIN = 1.25
# Names of a replica's figures, as Ray's controller gets them.
SLOTS, REQUESTS, SERVICE, FIRST_AUDIO = "slots", "requests", "service_s", "first_audio_s"
_PREFIX = "qwen3_omni_"


@dataclass(frozen=True)
class FleetLoad:
    """Load of all replicas together, as means over Ray's last half minute.

    requests: that run or wait. slots: requests that one replica runs at a time. service_s: time
    that a request holds a slot. first_audio_s: from getting a slot to the first sample; infinite
    where nothing has spoken yet.
    """

    requests: float
    slots: float
    service_s: float
    first_audio_s: float

    @property
    def peak(self) -> float:
        """Requests at a busy moment, where each comes independently of the others."""
        return self.requests + PEAK * math.sqrt(self.requests)

    def predicted_s(self, replicas: int) -> float:
        """Return the time to first audio of a request that comes at a busy moment."""
        slots = self.slots * replicas
        if not slots:
            return math.inf
        return self.first_audio_s + max(0.0, self.peak - slots) * self.service_s / slots

    def needed(self, target_s: float) -> int:
        """Return the fewest replicas whose predicted time to first audio is target_s at most.

        Where first_audio_s alone is longer, more replicas don't help: as many as have a slot for
        every request.
        """
        wait_s = max(0.0, target_s - self.first_audio_s)
        queue = wait_s / self.service_s if self.service_s else 0.0
        return math.ceil(self.peak / (1 + queue) / self.slots - 1e-9)


def replicas_wanted(load: FleetLoad, replicas: int, target_s: float, spare: int) -> int:
    """Return how many replicas there should be. replicas: that run or are being loaded.

    spare: more than the load needs, since a load takes minutes: also the least there ever are. A
    fleet shrinks only to what would be enough for a quarter more requests, so that a load that goes
    up and down by less does not let it grow and shrink in turn.
    """
    grown = load.needed(target_s) + spare
    shrunk = replace(load, requests=SHRINK_MARGIN * load.requests).needed(target_s) + spare
    return max(grown, min(replicas, shrunk))


class FirstAudioPolicy:
    """Autoscaling policy of Ray Serve. Its figures are those of `ReplicaFigures.read`.

    target_s: time to first audio that is aimed at, above what a reply alone takes. spare: see
    replicas_wanted.
    """

    def __init__(self, target_s: float = 2.0, spare: int = 1):
        if not target_s > 0 or spare < 0:
            raise ValueError(
                f"target_s is above 0 and spare is 0 or more, got {target_s} and {spare}."
            )
        self.target_s, self.spare = target_s, spare

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted replicas, by Ray's AutoscalingContext, and no state."""
        load = load_of(context.aggregated_metrics or {}, context.total_queued_requests or 0.0)
        replicas = context.target_num_replicas
        if load is None:  # no replica has reported yet
            return replicas, {}
        return replicas_wanted(load, replicas, self.target_s, self.spare), {}


def load_of(figures: Mapping[str, Mapping[Any, float]], queued: float) -> FleetLoad | None:
    """Return the load that the replicas report, None where none does.

    figures: by name and replica. queued: requests that no replica has taken yet.
    """
    slots = figures.get(SLOTS)
    if not slots:
        return None

    def mean(name: str, otherwise: float) -> float:
        values = figures.get(name)
        return math.fsum(values.values()) / len(values) if values else otherwise

    requests = math.fsum(figures.get(REQUESTS, {}).values()) + queued
    first_audio_s = mean(FIRST_AUDIO, math.inf)
    return FleetLoad(requests, max(slots.values()), mean(SERVICE, 0.0), first_audio_s)


class ReplicaFigures:
    """Figures of one replica for the policy, from its registry of Prometheus.

    Times are means over the last WINDOW_S, or as long as no reply has ended in it, what they were.
    """

    def __init__(self, registry: Any, now: Callable[[], float] = time.monotonic):
        self._registry, self._now = registry, now
        self._seen: deque[tuple[float, dict[str, float]]] = deque()
        self._times: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return them by name, as record_autoscaling_stats of a deployment does."""
        families = self._registry.collect()
        found = {s.name: s.value for f in families for s in f.samples if not s.labels}
        figures = {name.removeprefix(_PREFIX): value for name, value in found.items()}
        if "slots" not in figures:
            return {}  # it loads
        self._update(figures)
        requests = figures["slots_used"] + figures["queue_length"]
        return {SLOTS: figures["slots"], REQUESTS: requests, **self._times}

    def _update(self, figures: dict[str, float]) -> None:
        now = self._now()
        before_s, before = self._seen[-1] if self._seen else (now, figures)
        held_s = before.get("held_s", 0.0) + (now - before_s) * figures["slots_used"]
        self._seen.append((now, {**figures, "held_s": held_s}))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        first, last = self._seen[0][1], self._seen[-1][1]

        def grown(name: str) -> float:
            return last.get(name, 0.0) - first.get(name, 0.0)

        replies, spoken = grown("queued_seconds_count"), grown("ttfb_seconds_count")
        if replies:  # by Little's law, for requests and turns of realtime sessions alike
            self._times[SERVICE] = grown("held_s") / replies
        if spoken:
            queued_s = grown("queued_seconds_sum") / replies if replies else 0.0
            first_audio_s = grown("ttfb_seconds_sum") / spoken - queued_s
            self._times[FIRST_AUDIO] = max(0.0, first_audio_s)
