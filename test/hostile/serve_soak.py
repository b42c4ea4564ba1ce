"""Mixed load on the server for an hour and more, while a stage is killed now and then.

    python -m test.hostile.serve_soak --minutes 75 --kill-every-minutes 15 --json result.json

It serves the checkpoint that ships. Clients draw what they do next: chat, listen to speech or to a
streamed answer, dictate, leave in the middle or before their request is complete, send what must be
refused; --realtime so many more talk over /v1/realtime, interrupt and vanish. Each has an address
of its own. What clients of a server may not see is counted as wrong, and 100 spoken answers are
judged by the ear.

Every few minutes all of them pause: a row is such an idle point, with the memory, threads and open
files of the server and its processes, and what clients got until then. With --kill-every-minutes
the stages have processes of their own. One of them is killed; the server ends with status 70 and is
started anew as deploy/systemd does it. A run is one server's life, whose KV caches are filled at
first. Its growth is the slope of a line through its idle points after its first quarter. The goal
is for the slope of all runs' lines together, which is less uncertain.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import numpy as np

from qwen3_omni_neuron.cli.model_arguments import SHIPPED, add_model_arguments, model_or_shipped
from test.hostile.slots import fill_slots
from test.hostile.soak.clients import Clients
from test.hostile.soak.gate import Gate
from test.hostile.soak.processes import descendants, kill, left_of, measured, stages
from testing.command_line import Figures, InputError, Row, natural, parser_of, positive, run
from testing.headlines import headline
from testing.http_client import ask
from testing.server_process import SLOTS, server_process
from train.judge import Judge

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "qwen3-omni-neuron.service"
MODEL_DIED = 70
NEAR_MINUTES = 0.02  # two points in time as near as this are one
DIES_S = 60.0  # for a server to end after a stage was killed
FREE_S, SETTLE_S = 30.0, 5.0  # for all to be free at an idle point, and until it is measured
GROWTH_MB_PER_HOUR = 10.0
LEFT = ("requests_in_progress", "slots_used", "queue_length", "realtime_sessions")
HELD = ("threads", "open_files", "children")


@dataclass
class Run:
    """One server's life.

    points: its idle points, whose at_minutes count since its KV caches were filled. ready_after_s:
    time since its start; ended_after_s: time since its stage was killed, or since SIGTERM.
    """

    number: int
    points: list[Row] = field(default_factory=list)
    minutes: float = 0.0
    status: int | None = None
    killed: str | None = None
    ready_after_s: float = 0.0
    ended_after_s: float = 0.0
    processes_left: int = 0

    @property
    def counted(self) -> list[Row]:
        """The idle points after the first quarter."""
        return [point for point in self.points if point["at_minutes"] >= self.minutes / 4]

    def row(self) -> Row:
        """Return its summary, with its growth until the last idle point that counts."""
        counted = self.counted
        growth, error = growth_of([self])
        more = {f"more_{n}": counted[-1][n] - counted[0][n] for n in HELD} if counted else {}
        shown: Row = {"run": self.number, "minutes": self.minutes, "idle_points": len(counted)}
        shown |= {"killed": self.killed, "status": self.status}
        shown |= {"ready_after_s": self.ready_after_s, "ended_after_s": self.ended_after_s}
        shown |= {"memory_mb_per_hour": growth, "standard_error": error}
        return {**shown, **more, "processes_left": self.processes_left}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("test.hostile.serve_soak", __doc__)
    add_model_arguments(parser, SHIPPED)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=positive, default=12)
    parser.add_argument("--realtime", type=natural, default=4, help="clients that talk; default: 4")
    parser.add_argument("--kill-every-minutes", type=float, help="kill a stage; default: never")
    parser.add_argument(
        "--idle-every-minutes", type=float, default=1.5, help="between idle points; default: 1.5"
    )
    return run("test.hostile.serve_soak", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Let the clients send requests to one server after the other."""
    if options.kill_every_minutes:
        options.placement = "split"
    gate, log = Gate(), Counter[str]()
    clients = Clients(gate, options.realtime, options.clients)
    minutes, runs = float(options.minutes), list[Run]()
    try:
        while minutes > 0:
            if runs:
                time.sleep(restart_s())
            runs.append(Run(len(runs)))
            live(runs[-1], options, minutes, gate, clients, log)
            minutes -= max(runs[-1].minutes, NEAR_MINUTES)
    finally:
        gate.end()
        if runs:
            clients.join()
    wrong_words = misheard(clients)
    rows = [{"run": one.number, **point} for one in runs for point in one.points]
    found = summary(runs, gate, log, len(clients.heard), wrong_words)
    met = list(found["goals"].values()).count("met")
    return rows, found, [headline("goals that are met", [met], "", f"of {len(found['goals'])}")]


def live(
    one: Run,
    options: argparse.Namespace,
    minutes: float,
    gate: Gate,
    clients: Clients,
    log: "Counter[str]",
) -> None:
    """Serve until a stage is killed, or to the end. minutes: the remaining time."""

    def on_line(line: str) -> None:
        event: Row = json.loads(line) if line.startswith("{") else {"event": line.strip()}
        if event.get("level") not in {"info", "debug", "warning"} and one.killed is None:
            log[str(event["event"])[:100]] += 1

    asked_s = time.monotonic()
    with server_process(model_or_shipped(options), options, on_line=on_line) as (url, process):
        one.ready_after_s = time.monotonic() - asked_s
        fill_slots(SLOTS, url)
        start_s = time.monotonic()
        if one.number == 0:
            clients.start(url)
        dies = 0 < (options.kill_every_minutes or 0) < minutes - NEAR_MINUTES
        end_s = start_s + 60 * (options.kill_every_minutes if dies else minutes)
        gate.open(url)
        while time.monotonic() < end_s:
            next_s = time.monotonic() + 60 * options.idle_every_minutes
            time.sleep(max(0.0, min(next_s, end_s) - time.monotonic()))
            if not dies or time.monotonic() < end_s:
                one.points.append(idle_point(gate, url, process, start_s))
                gate.open(url)
        one.minutes = (time.monotonic() - start_s) / 60
        known = descendants(process.pid)
        end_s = time.monotonic()
        if dies:
            found = stages(process.pid)
            if not found:
                raise InputError("the server has no processes of stages.")
            number = one.number % len(found)
            one.killed = ("thinker", "talker", "vocoder")[number]
            gate.killed()
            kill(found[number])
        else:
            gate.close()
            process.terminate()
        one.status = ended(process)
        one.ended_after_s = time.monotonic() - end_s
        gate.close()
    one.processes_left = len(left_of(known))


def idle_point(gate: Gate, url: str, process: "Popen[str]", start_s: float) -> Row:
    """Let all clients pause, and measure what the server holds."""
    stuck = not gate.close()
    end_s = time.monotonic() + FREE_S
    while any((held := held_at(url)).values()) and time.monotonic() < end_s:
        time.sleep(0.1)
    time.sleep(SETTLE_S)
    at_minutes = (time.monotonic() - start_s) / 60
    found = measured(process.pid)
    return {"at_minutes": at_minutes, **found, **held, "stuck": stuck, "counts": dict(gate.counts)}


def held_at(url: str) -> dict[str, float]:
    """Return the figures that must be 0 while there are no requests."""
    lines = ask(f"{url}/metrics").body.decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(values[f"qwen3_omni_{name}"]) for name in LEFT}


def ended(process: "Popen[str]") -> int | None:
    """Return the status of a server that has to end by itself now; None if it does not."""
    try:
        return process.wait(DIES_S)
    except TimeoutExpired:
        process.kill()
        return None


def restart_s() -> float:
    """Return how long systemd waits before it restarts the server: RestartSec."""
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    return float(next(x.split("=")[1] for x in lines if x.startswith("RestartSec=")))


def growth_of(runs: Sequence[Run]) -> tuple[float | None, float | None]:
    """Return the memory growth of some runs in MB an hour, and its standard error.

    It is the slope of least-squares lines through their idle points, one slope for all runs. None
    if they have too few points.
    """
    runs = [one for one in runs if one.counted]
    lines = [np.array([(p["at_minutes"] / 60, p["memory_mb"]) for p in r.counted]) for r in runs]
    x, y = np.concatenate([np.empty((0, 2)), *(line - line.mean(0) for line in lines)]).T
    free = len(x) - len(runs) - 1
    if free < 1:
        return None, None
    slope = float((x * y).sum() / (x * x).sum())
    return slope, float(np.sqrt(((y - slope * x) ** 2).sum() / free / (x * x).sum()))


def misheard(clients: Clients) -> list[str]:
    """Return the texts of answers that say something else than they should."""
    if not clients.heard:
        return []
    judge = Judge()
    said = [
        (wanted, " ".join(found.word for found in judge.hear(samples)))
        for wanted, samples in clients.heard
    ]
    return [f"{heard!r} for {wanted!r}" for wanted, heard in said if heard != wanted]


def summary(
    runs: Sequence[Run], gate: Gate, log: "Counter[str]", heard: int, wrong_words: Sequence[str]
) -> dict[str, Any]:
    """Return the outcomes of all runs, and which goals are met."""
    points = [point for one in runs for point in one.points]
    found = [one.row() for one in runs]
    growth, error = growth_of(runs)
    held = [row[f"more_{name}"] for row in found for name in HELD if f"more_{name}" in row]
    goals = {
        f"memory grows by less than {GROWTH_MB_PER_HOUR:g} MB an hour": None
        if growth is None
        else growth < GROWTH_MB_PER_HOUR,
        "no slot, request or session is left at an idle point": not any(
            point["stuck"] or any(point[name] for name in LEFT) for point in points
        ),
        "no more threads, files or processes at the last idle point": all(n <= 0 for n in held),
        "no process is left of a server that ended": not any(one.processes_left for one in runs),
        f"a server whose stage was killed ends with {MODEL_DIED}, and with 0 otherwise": all(
            one.status == (MODEL_DIED if one.killed else 0) for one in runs
        ),
        "all answers are right": not gate.wrong and not wrong_words,
        "the server logged no errors of its own": not log,
    }
    words = {True: "met", False: "not met", None: "not measured"}
    return {
        "slots": SLOTS,
        "runs": found,
        "memory_mb_per_hour": growth,
        "standard_error": error,
        "counts": dict(sorted(gate.counts.items())),
        "wrong": dict(gate.wrong),
        "heard": heard,
        "misheard": list(wrong_words),
        "logged": dict(log),
        "goals": {goal: words[met] for goal, met in goals.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
