"""Load on replicas in a Ray cluster for minutes, while they die, go and are replaced.

    python -m test.hostile.fleet_soak --minutes 5 --clients 16 --json result.json

It starts a cluster of its own with three replicas of the checkpoint that ships, on a thread each.
Each client is one session, whose KV rows its replica keeps. Half of the answers are streamed. In
turn a replica is killed, the fleet shrinks to two and grows again, and all replicas are updated. A
row is one of these: how long it took until all replicas ran again, the answers until then, those
that never began, the streams that broke off, and when the last of them did; and the share of the
prompts' rows that a replica had already. At the end a sample is judged by the ear. Needs the extra
`ray`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from testing.command_line import Figures, Row, parser_of, positive, run
from testing.fleet_load import RETRIES, Answer, Load, cut, failed, wrong
from testing.headlines import headline
from train.judge import Judge

if TYPE_CHECKING:
    from testing.ray_cluster import Cluster

NAME, REPLICAS, SLOTS = "speaking", 3, 8
FAULTS = ("killed", "shrunk", "grown", "updated")
CALM_S = 5.0  # before each disturbance
SAMPLE = 100
RESTART_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("test.hostile.fleet_soak", __doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=positive, default=16)
    return run("test.hostile.fleet_soak", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Send the load, and disturb the replicas in one way after the other."""
    from testing.ray_cluster import cluster

    rows: list[Row] = []
    with cluster() as fleet:
        deploy(fleet, REPLICAS, 0)
        fleet.wait_for(NAME, REPLICAS)
        with Load(lambda: fleet.client(retries=RETRIES), options.clients) as load:
            end_s = load.note("begun") + 60 * options.minutes
            while time.monotonic() < end_s:
                time.sleep(CALM_S)
                rows.append(disturb(fleet, load, len(rows)))
    mistakes = wrong(load.answers, Judge(), SAMPLE)
    figures = {
        "answers": len(load.answers),
        "never_began": len(failed(load.answers)),
        "broke_off": len(cut(load.answers)),
        "reused": cached_share(load.answers),
        "heard": SAMPLE,
        "wrong": len(mistakes),
    }
    headlines = [
        headline("answers that broke off", [figures["broke_off"]], "", f"of {len(load.answers)}"),
        headline("wrong answers", [len(mistakes)], "", f"goal 0 of {SAMPLE}"),
    ]
    return rows, figures, headlines


def disturb(fleet: "Cluster", load: Load, number: int) -> Row:
    """Do the next thing to the replicas, and wait until all of them run again."""
    fault = FAULTS[number % len(FAULTS)]
    before, moment = set(fleet.replicas(NAME)), f"{number} {fault}"
    start_s = load.note(moment)
    replicas = REPLICAS - (fault == "shrunk")
    if fault == "killed":
        fleet.kill(NAME)
        fleet.wait_for_new(NAME, before, RESTART_S)
    else:
        deploy(fleet, replicas, (number + 1) // len(FAULTS))
    if fault == "updated":
        fleet.wait_for_others(NAME, before)
    fleet.wait_for(NAME, replicas)
    took_s = time.monotonic() - start_s
    answers = load.between(moment)
    ends = [one.ended_s - start_s for one in cut(answers)]
    return {
        "fault": fault,
        "took_s": took_s,
        "answers": len(answers),
        "never_began": len(failed(answers)),
        "broke_off": len(ends),
        "last_broke_off_s": max(ends, default=None),
        "reused": cached_share(answers),
    }


def cached_share(answers: Sequence[Answer]) -> float:
    """Return the share of the prompts' rows that were in the replicas' prefix caches."""
    return sum(one.cached_rows for one in answers) / max(1, sum(one.rows for one in answers))


def deploy(fleet: "Cluster", replicas: int, updates: int) -> None:
    """Deploy this many replicas. updates: earlier updates, each of which changes a setting."""
    fleet.deploy(NAME, replicas, dtype="float32", max_concurrency=SLOTS, max_media=1 + updates)


if __name__ == "__main__":
    sys.exit(main())
