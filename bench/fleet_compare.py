"""The simulation of a fleet beside a real one: three replicas in a Ray cluster of this machine.

    python -m bench.fleet_compare --clients 1,6,12 --json fleet_compare.json

Service curves are measured through the API in this process, at several numbers of requests at once
(first sample, time a frame, CPU time), with one thread a replica; and what Ray, HTTP and the client
add to one request alone (time, CPU time) through an application of one replica. From these alone
the simulation predicts three replicas, which share the cores of this machine with Ray's processes
and with the clients; the same clients ask the real ones. All cases take turns, several times, since
a machine's speed changes. Replies are as long as those of the simulated load in the mean. Needs the
extra `ray`.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.models import add_model_arguments, chosen_checkpoint, load_chosen
from bench.serve_load import Way, at_once, limits, over_http, through_api
from testing.command_line import Figures, Row, natural, parser_of, positive, run, sizes
from testing.headlines import headline
from testing.metrics import RequestMetrics, request_metrics
from testing.replaying.curves import FRAME_S, RANKS, ServiceCurves
from testing.replaying.fleet import Fleet, Plan, Talk
from testing.replaying.load import RequestLengths
from testing.server_process import SLOTS

REPLICAS, QUEUED = 3, 8
AT_ONCE = (1, 2, 4, 8)
BACKGROUND_S, SIMULATED_S, AGREES = 3.0, 300.0, 0.15


@dataclass
class Observations:
    """Requests of one case: seconds of all, and CPU seconds of this machine."""

    replies: list[RequestMetrics] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    def observe(self, way: Way, clients: int, requests: int) -> None:
        """Run clients, each with its requests in sequence."""
        before_s = tree_cpu_s()
        seconds, events = at_once(way, clients, requests)
        self.cpu_s += tree_cpu_s() - before_s
        self.seconds += seconds
        self.replies += map(request_metrics, events)

    @property
    def first_audio_s(self) -> list[float]:
        """Time to the first sample of each request."""
        return [m.ttfb_s for m in self.replies if m.ttfb_s is not None]

    @property
    def total_s(self) -> float:
        """Mean time of a reply."""
        return statistics.mean(m.total_s for m in self.replies)

    @property
    def frames(self) -> float:
        """Mean frames of a reply."""
        return statistics.mean(m.audio_s for m in self.replies) / FRAME_S


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("fleet_compare", __doc__)
    add_model_arguments(parser)
    parser.set_defaults(threads=1)
    parser.add_argument("--clients", type=sizes, default=[1, 6, 12], metavar="N,N,...")
    parser.add_argument("--requests", type=positive, default=24, help="of a case; default: 24")
    parser.add_argument("--rounds", type=positive, default=4, help="of all cases; default: 4")
    parser.add_argument("--max-frames", type=positive, default=200, help="of a reply; default: 200")
    parser.add_argument("--seed", type=natural, default=0, help="of the simulation")
    return run("fleet_compare", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure and predict, at each number of clients."""
    from testing.ray_cluster import cluster  # Ray, which the help text does not need

    with (
        chosen_checkpoint(options) as checkpoint,
        cluster() as ray,
        load_chosen(checkpoint, options, SLOTS, reuse=True) as omni,
    ):
        args: dict[str, Any] = {"model": str(checkpoint), "model_name": "load"}
        args |= {"dtype": options.dtype, "placement": options.placement}
        args |= {"max_concurrency": SLOTS, "max_queued": QUEUED, "threads": options.threads}
        alone, over_ray = partial(through_api, omni, options), dict[int, Way]()
        for replicas in (1, REPLICAS):
            name, prefix = f"of-{replicas}", f"/of-{replicas}"
            ray.plan(name, replicas, prefix, **args)
            ray.deploy()
            ray.wait_for(name, replicas)
            over_ray[replicas] = partial(over_http, f"{ray.url}{prefix}/v1", limits(options))
            at_once(over_ray[replicas], 2 * replicas, 2)  # so that every replica has answered
        cases: dict[tuple[int, int], tuple[Way, int]]
        cases = {(0, count): (alone, count) for count in AT_ONCE}
        cases[1, 1] = over_ray[1], 1
        cases |= {(REPLICAS, count): (over_ray[REPLICAS], count) for count in options.clients}
        found = {case: Observations() for case in cases}
        background = Observations()
        # In turn, so that a slow phase of this machine affects all of them.
        for _ in range(options.rounds):
            before_s = tree_cpu_s()
            time.sleep(BACKGROUND_S)
            background.seconds += BACKGROUND_S
            background.cpu_s += tree_cpu_s() - before_s
            for case, (way, clients) in cases.items():
                found[case].observe(way, clients, max(2, options.requests // clients))
    curves, lengths = curves_of({count: found[0, count] for count in AT_ONCE}, found[1, 1])
    cores = len(os.sched_getaffinity(0)) - background.cpu_s / background.seconds
    rows = []
    for clients in options.clients:
        predicted = predict(clients, curves, lengths, cores, options.seed)
        rows.append(row_of(clients, predicted, found[REPLICAS, clients]))
    ratios = [abs(row[name] - 1) for row in rows for name in ("throughput_ratio", "p50_ratio")]
    summary = {
        "alone": [case_of(count, found[0, count]) for count in AT_ONCE],
        "through_ray": case_of(1, found[1, 1]),
        "cores": cores,
        "largest_difference": max(ratios),
        "agrees": max(ratios) <= AGREES,
    }
    headlines = [
        headline("first sample, predicted / measured", [row["p50_ratio"] for row in rows]),
        headline("replies a second, predicted / measured", [r["throughput_ratio"] for r in rows]),
        headline("largest difference", [max(ratios)], "%", f"goal {100 * AGREES:g} % at most"),
    ]
    return rows, summary, headlines


def curves_of(
    alone: dict[int, Observations], through_ray: Observations
) -> tuple[ServiceCurves, list[RequestLengths]]:
    """Return the curves of a replica behind Ray, and the lengths of the replies.

    The time that Ray adds to a lone request is added to every request; the cores that a request
    keeps busy are its CPU time over its time.
    """
    one = alone[1]
    first_s = statistics.median(through_ray.first_audio_s) - statistics.median(one.first_audio_s)
    total_s = through_ray.total_s - one.total_s
    cpu_s = through_ray.cpu_s / len(through_ray.replies) - one.cpu_s / len(one.replies)
    first, frame, cores = [], [], []
    for count, found in alone.items():
        first.append(np.quantile(found.first_audio_s, RANKS) + first_s)
        total = found.total_s + total_s
        frame.append((total - float(np.mean(first[-1]))) / found.frames)
        cores.append(count * (found.cpu_s / len(found.replies) + cpu_s) / total)
    curves = ServiceCurves(
        (1,), tuple(alone), np.array([first]), np.array([frame]), np.array(cores)
    )
    frames = [round(m.audio_s / FRAME_S) for m in one.replies]
    return curves, [RequestLengths(0, 0, 0.0, 0, count) for count in frames if count]


def predict(
    clients: int,
    curves: ServiceCurves,
    lengths: Sequence[RequestLengths],
    cores: float,
    seed: int,
) -> tuple[float, float]:
    """Simulate the clients. Returns replies a second, and the median time to the first sample."""
    from testing.replaying.ray_parts import RayRing

    plan = Plan(SLOTS, queued=QUEUED, replicas=REPLICAS, cores=cores)
    fleet = Fleet(plan, curves, Talk(lengths, turns=1.0), RayRing(), seed)
    outcome = fleet.closed(clients, SIMULATED_S * statistics.mean(alone_s(curves, lengths)))
    return len(outcome.first_audio_s) / outcome.seconds, outcome.quantile_s(0.5)


def alone_s(curves: ServiceCurves, lengths: Sequence[RequestLengths]) -> list[float]:
    """Return the time of each reply without other requests."""
    first_s, frame_s = float(np.mean(curves.first_audio_of(0, 1))), curves.frame_of(0, 1)
    return [first_s + frame_s * one.frames for one in lengths]


def row_of(clients: int, predicted: tuple[float, float], found: Observations) -> Row:
    """Compare a prediction with what was measured."""
    per_s = len(found.replies) / found.seconds
    p50_s = statistics.median(found.first_audio_s)
    return {
        "clients": clients,
        "requests": len(found.replies),
        "predicted_replies_per_s": predicted[0],
        "replies_per_s": per_s,
        "throughput_ratio": predicted[0] / per_s,
        "predicted_first_audio_p50_s": predicted[1],
        "first_audio_p50_s": p50_s,
        "p50_ratio": predicted[1] / p50_s,
        "cpu_s": found.cpu_s / len(found.replies),
        "cores": found.cpu_s / found.seconds,
    }


def case_of(clients: int, found: Observations) -> Row:
    """Return the figures of one measured case."""
    return {
        "clients": clients,
        "requests": len(found.replies),
        "replies_per_s": len(found.replies) / found.seconds,
        "first_audio_p50_s": statistics.median(found.first_audio_s),
        "total_s": found.total_s,
        "cpu_s": found.cpu_s / len(found.replies),
    }


def tree_cpu_s() -> float:
    """Return the CPU time of this process and its descendants, including those that have ended."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # the process has just ended
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))  # user and system time, also of ended children
    tree, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in tree} - tree
        tree, grown = tree | more, bool(more)
    return sum(ticks.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
