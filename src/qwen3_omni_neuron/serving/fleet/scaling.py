"""Autoscaling by the predicted time to first audio: queue x service time over all slots.

A YAML of Ray Serve names the policy in its autoscaling config:

    policy:
      policy_function: qwen3_omni_neuron.serving.fleet.scaling:FirstAudioPolicy
      policy_kwargs: {target_s: 2.0, spare: 1, gain: 1.0}

Ray counts open realtime sockets as requests; the policy counts requests that have or wait for a
slot. It uses replies per second and a reply's time when all slots run: a replica with few requests
answers sooner, and a fleet shrunk to their number would soon be too slow.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

WINDOW_S = 60.0
PEAK = 2.0  # standard deviations: 98 % of loads are lower
SHRINK_MARGIN = 1.25
# Names of a replica's metrics in Ray's controller.
SLOTS, REQUESTS, REPLIES = "slots", "requests", "replies_per_s"
SERVICE, AT_ONCE, FIRST_AUDIO = "service_s", "at_once", "first_audio_s"
_PREFIX = "qwen3_omni_"


@dataclass(frozen=True)
class FleetLoad:
    """Load of all replicas together, as means over up to a minute.

    requests: number that would run or wait if all slots ran. slots: per replica. service_s,
    first_audio_s: from getting a slot to its release, and to the first sample, if all slots run;
    first_audio_s is infinite without speech.
    """

    requests: float
    slots: float
    service_s: float
    first_audio_s: float

    @property
    def peak(self) -> float:
        """Requests at a busy moment, if they arrive independently."""
        return self.requests + PEAK * math.sqrt(self.requests)

    def needed(self, target_s: float) -> int:
        """Return the fewest replicas with a predicted time to first audio of at most target_s.

        A busy moment's requests beyond the slots wait; none does if first_audio_s alone is longer.
        """
        wait_s = max(0.0, target_s - self.first_audio_s)
        queue = wait_s / self.service_s if self.service_s else 0.0
        return math.ceil(self.peak / (1 + queue) / self.slots - 1e-9)


def replicas_wanted(load: FleetLoad, replicas: int, target_s: float, spare: int) -> int:
    """Return the wanted number of replicas. replicas: number that run or load now.

    spare: replicas beyond need, since loading takes minutes; also the minimum. A fleet shrinks only
    to a size that suffices for a quarter more requests.
    """
    grown = load.needed(target_s) + spare
    shrunk = replace(load, requests=SHRINK_MARGIN * load.requests).needed(target_s) + spare
    return max(grown, min(replicas, shrunk))


class FirstAudioPolicy:
    """Autoscaling policy of Ray Serve. It uses the metrics of `ReplicaFigures.read`.

    target_s: target time to first audio, above a lone reply's. spare: see replicas_wanted. gain: a
    replica's throughput with all slots relative to one: 1 if eight requests take eight times as
    long (`bench.concurrency` measures it).
    """

    def __init__(self, target_s: float = 2.0, spare: int = 1, gain: float = 1.0):
        if not (target_s > 0 and spare >= 0 and gain > 0):
            raise ValueError(
                "target_s and gain are above 0 and spare is 0 or more, "
                f"got {target_s}, {gain} and {spare}."
            )
        self.target_s, self.spare, self.gain = target_s, spare, gain

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas for Ray's context, and an empty state."""
        metrics, queued = context.aggregated_metrics or {}, context.total_queued_requests or 0.0
        load = load_of(metrics, queued, self.gain)
        replicas = context.target_num_replicas
        if load is None:  # no replica has reported yet
            return replicas, {}
        return replicas_wanted(load, replicas, self.target_s, self.spare), {}


def load_of(
    metrics: Mapping[str, Mapping[Any, float]], queued: float, gain: float
) -> FleetLoad | None:
    """Return the load that the replicas report, or None before any report.

    metrics: values by name and replica. queued: requests not yet in a replica. Assumes that a
    request's time grows linearly with the number of concurrent requests.
    """
    if not metrics.get(SLOTS):
        return None

    def mean(name: str, otherwise: float) -> float:
        values = metrics.get(name)
        return math.fsum(values.values()) / len(values) if values else otherwise

    def total(name: str) -> float:
        return math.fsum(metrics.get(name, {}).values())

    slots = mean(SLOTS, 1.0)
    each = (slots / gain - 1) / (slots - 1) if slots > 1 else 0.0  # time that another one adds
    slower = (1 + (slots - 1) * each) / (1 + (mean(AT_ONCE, slots) - 1) * each)
    service_s = mean(SERVICE, 0.0) * slower
    # Replies per second exclude waiting requests: if many wait, the second is larger.
    requests = max(total(REPLIES) * service_s, total(REQUESTS) + queued)
    return FleetLoad(requests, slots, service_s, mean(FIRST_AUDIO, math.inf) * slower)


class ReplicaFigures:
    """Metrics of one replica for the policy, from its Prometheus registry.

    Means over the last WINDOW_S; times keep their values while no reply ends.
    """

    def __init__(self, registry: Any, now: Callable[[], float] = time.monotonic):
        self._registry, self._now = registry, now
        self._seen: deque[tuple[float, dict[str, float]]] = deque()
        self._times: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return the metrics by name, as record_autoscaling_stats of a deployment does."""
        families = self._registry.collect()
        found = {s.name: s.value for f in families for s in f.samples if not s.labels}
        metrics = {name.removeprefix(_PREFIX): value for name, value in found.items()}
        if "slots" not in metrics:
            return {}  # the model is loading
        seconds, grown = self._grown(metrics)
        replies, spoken = grown("queued_seconds_count"), grown("ttfb_seconds_count")
        if replies:  # by Little's law, for requests and realtime turns alike
            self._times[SERVICE] = grown("held_s") / replies
            self._times[AT_ONCE] = grown("beside_s") / grown("held_s") if grown("held_s") else 1.0
        if spoken:
            queued_s = grown("queued_seconds_sum") / replies if replies else 0.0
            first_audio_s = grown("ttfb_seconds_sum") / spoken - queued_s
            self._times[FIRST_AUDIO] = max(0.0, first_audio_s)
        return {
            SLOTS: metrics["slots"],
            REQUESTS: metrics["slots_used"] + metrics["queue_length"],
            REPLIES: replies / seconds if seconds else 0.0,
            **self._times,
        }

    def _grown(self, metrics: dict[str, float]) -> tuple[float, Callable[[str], float]]:
        """Return the seconds since the window's start, and a function of a metric's growth.

        held_s: total time of requests in slots. beside_s: the same, each second weighted by the
        number of running requests.
        """
        now, used = self._now(), metrics["slots_used"]
        before_s, before = self._seen[-1] if self._seen else (now, metrics)
        held_s = before.get("held_s", 0.0) + (now - before_s) * used
        beside_s = before.get("beside_s", 0.0) + (now - before_s) * used**2
        self._seen.append((now, {**metrics, "held_s": held_s, "beside_s": beside_s}))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        first_s, first = self._seen[0]
        last = self._seen[-1][1]
        return now - first_s, lambda name: last.get(name, 0.0) - first.get(name, 0.0)
