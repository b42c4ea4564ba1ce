"""A fleet of replicas on a virtual clock, with Ray's ring and our autoscaling: no measurement.

    python -m bench.fleet                                  # 1 to 1,000 replicas, and a day
    python -m bench.fleet --profile expected --placement shared --price-per-hour 12.5
    python -m bench.fleet_compare                          # the same simulation, beside a cluster

One replica is replayed at a few loads (see bench/replay.py), which gives service curves: time to
first audio and time a frame, by rows to prefill and by requests at once. Many replicas take their
times from the curves. People talk in conversations: several turns, each after the last reply was
heard and a time to think; a turn's prompt has all turns before it.

Busy hour: the most replies a second a replica at which 95 % of first samples come within
--target-s, at each number of replicas, with affinity (a conversation goes where its KV rows are)
and without; above 100 replicas the load is that of the number before. Day: load that rises and
falls, with bursts, on a fleet that the policy grows and shrinks. A replica's memory of
conversations is its slots (--slots); it runs at once as many requests as still play without a
pause, or --at-once.

Needs the extra `ray`.
"""

import argparse
import dataclasses
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from qwen3_omni_neuron.serving.fleet.scaling import FirstAudioPolicy
from testing.command_line import InputError, Row, natural, parser_of, positive, sizes
from testing.headlines import headline
from testing.replaying.cases import PROFILES
from testing.replaying.curves import ServiceCurves, replayed_curves
from testing.replaying.device import PLACEMENTS
from testing.replaying.fleet import FRAME_S, Fleet, Outcome, Plan, Ring, Talk
from testing.replaying.load import make_load
from testing.replaying.profiles import ProfileError, StageProfile
from testing.results import results_of, save

SPARE = 1  # replicas beyond the load's need
LOAD_S, THINK_S = 300.0, 8.0  # time of a load, and mean time between turns
PLAYS = 0.9  # share of a frame's 80 ms in which frames must come to play without a pause
CURVE_ROWS = 320  # a new turn after its conversation
# Of 8 and 24 of its 64 cores: all times of the profiles, those of the vocoder, too, are of TP 8.
REPLICAS_A_MACHINE = {"shared": 8, "split": 2}
WARM_S, LEAST_S, REPLIES = 200.0, 100.0, 10_000
HALVINGS, SEARCHED = 6, 100
DAY_S, LOWEST, BURSTS, BURST_S, BURST = 86400.0, 0.2, 6, 600.0, 1.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, or compare; print the tables. Returns the exit status."""
    parser = parser_of("fleet", __doc__)
    names = ", ".join(sorted(file.stem for file in PROFILES.glob("*.json")))
    parser.add_argument("--profile", default="port-167,expected", help=f"{names}, or files")
    parser.add_argument("--placement", choices=(*PLACEMENTS, "both"), default="both")
    parser.add_argument("--replicas", type=sizes, default=[1, 10, 100, 1000], metavar="N,N,...")
    parser.add_argument("--day-replicas", type=natural, default=20, help="at its peak; 0: no day")
    parser.add_argument("--at-once", type=positive, help="requests of a replica")
    parser.add_argument("--queued", type=natural, default=0, help="that wait in it; default: 0")
    parser.add_argument("--slots", type=positive, default=8, help="of a replica; default: 8")
    parser.add_argument("--target-s", type=float, default=2.0, help="time to first audio")
    parser.add_argument("--turns", type=float, default=5.0, help="mean of a conversation")
    parser.add_argument("--price-per-hour", type=float, help="of a machine of 64 cores")
    parser.add_argument("--requests", type=positive, default=24, help="of each point of a curve")
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    try:
        for name in options.profile.split(","):
            file = PROFILES / f"{name}.json"
            profile = StageProfile.load(file if file.exists() else Path(name))
            for placement in PLACEMENTS if options.placement == "both" else [options.placement]:
                rows += simulated(profile, placement, options)
    except (InputError, ProfileError) as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 1
    firsts = [row["first_audio_p95_s"] for row in rows if row["affinity"]]
    hours = [row["machine_h_per_1m_min"] for row in rows if row["affinity"]]
    headlines = [
        headline("simulated: p95 of TTFB", firsts, "s", f"target {options.target_s:g} s"),
        headline("simulated: a million minutes", hours, "machine hours"),
    ]
    results = results_of("fleet", arguments, options, rows, {}, headlines)
    if options.json:
        save(results, options.json)
    print("\n".join([*tables(rows, options.price_per_hour), *results.headline_texts]))
    return 0


def simulated(profile: StageProfile, placement: str, options: argparse.Namespace) -> list[Row]:
    """Simulate one profile's fleets."""
    from testing.replaying.ray_parts import RayDelays, RayRing

    load = make_load(options.requests, options.seed)
    curves = replayed_curves(profile, placement, options.slots, load)
    at_once = options.at_once or most_at_once(curves, options.slots)
    talk = Talk(make_load(1000, options.seed), options.turns, THINK_S)
    plan = Plan(at_once, queued=options.queued, slots=options.slots, load_s=LOAD_S)
    case = {"profile": profile.name, "placement": placement, "at_once": at_once}
    rows, shares = [], dict[bool, float]()
    for replicas in options.replicas:
        for affinity in (True, False):
            fixed = dataclasses.replace(plan, replicas=replicas, affinity=affinity)
            known = shares.get(affinity) if replicas > SEARCHED else None
            found = busiest(fixed, curves, talk, RayRing, options, known)
            shares[affinity], outcome = found
            row = {"kind": "busy hour", **case, "replicas": replicas, "affinity": affinity}
            rows.append(row | figures(outcome, placement))
    for affinity in (True, False) if options.day_replicas else ():
        gain = at_once * curves.frame_of(CURVE_ROWS, 1) / curves.frame_of(CURVE_ROWS, at_once)
        scaled = dataclasses.replace(
            plan,
            affinity=affinity,
            replicas=max(1, round(LOWEST * options.day_replicas)) + SPARE,
            most=4 * options.day_replicas,
            policy=FirstAudioPolicy(options.target_s, SPARE, gain),
            settle=RayDelays(max_replicas=4 * options.day_replicas),
        )
        peak = options.day_replicas * replies_per_s(curves, at_once, talk) / BURST / talk.turns
        rate = day_rate(peak, options.seed)
        outcome = Fleet(scaled, curves, talk, RayRing(), options.seed).day(
            rate, BURST * peak, DAY_S
        )
        row = {"kind": "day", **case, "replicas": options.day_replicas, "affinity": affinity}
        rows.append(row | figures(outcome, placement))
    return rows


def most_at_once(curves: ServiceCurves, slots: int) -> int:
    """Return the most concurrent requests whose speech still plays without a pause."""
    paces = [n for n in range(1, slots + 1) if curves.frame_of(CURVE_ROWS, n) < PLAYS * FRAME_S]
    if not paces:
        raise InputError("one request alone is slower than playback.")
    return paces[-1]


def replies_per_s(curves: ServiceCurves, at_once: int, talk: Talk) -> float:
    """Return the replies a second of a replica that always runs this many requests."""
    frames = sum(lengths.frames for lengths in talk.lengths) / len(talk.lengths)
    first_s = float(curves.first_audio_of(CURVE_ROWS, at_once).mean())
    return at_once / (first_s + frames * curves.frame_of(CURVE_ROWS, at_once))


def busiest(
    plan: Plan,
    curves: ServiceCurves,
    talk: Talk,
    ring: Callable[[], Ring],
    options: argparse.Namespace,
    share: float | None = None,
) -> tuple[float, Outcome]:
    """Simulate the highest load that meets the target, for REPLIES or LEAST_S, after WARM_S.

    share: the load, if known, as a share of the load of full replicas. Returns the share, and the
    outcome.
    """
    most = plan.replicas * replies_per_s(curves, plan.at_once, talk)
    seconds = WARM_S + max(LEAST_S, REPLIES / most)

    def outcome_of(share: float) -> Outcome:
        rate = share * most / talk.turns
        fleet = Fleet(plan, curves, talk, ring(), options.seed, WARM_S)
        return fleet.day(lambda _: rate, rate, seconds)

    if share is not None:
        return share, outcome_of(share)
    low, high, best = 0.0, 1.25, None
    for _ in range(HALVINGS):
        share = (low + high) / 2
        outcome = outcome_of(share)
        if outcome.refused or not outcome.quantile_s(0.95) <= options.target_s:
            high = share
        else:
            low, best = share, outcome
    if best is None:
        raise InputError(f"no load has its first samples within {options.target_s:g} s.")
    return low, best


def day_rate(mean: float, seed: int) -> Callable[[float], float]:
    """Return conversations a second by the time of a day: lowest at 3, highest at 15 o'clock.

    Bursts, at random times, have half as many again.
    """
    dice = random.Random(seed)
    bursts = [dice.uniform(0, DAY_S) for _ in range(BURSTS)]

    def rate(now: float) -> float:
        wave = (1 - math.cos(2 * math.pi * (now / DAY_S - 3 / 24))) / 2
        burst = BURST if any(0 <= now - start < BURST_S for start in bursts) else 1.0
        return mean * burst * (LOWEST + (1 - LOWEST) * wave)

    return rate


def figures(outcome: Outcome, placement: str) -> Row:
    """Return an outcome's figures, times in seconds.

    held, new: shares of all prompt rows that the replica held, and that no replica can hold.
    machine_h_per_1m_min: machine hours for a million minutes of speech.
    """
    replies, machines = len(outcome.first_audio_s), REPLICAS_A_MACHINE[placement]
    speech_min = outcome.speech_s / 60
    return {
        "replies": replies,
        "replies_per_s_replica": replies / outcome.replica_s,
        "first_audio_p50_s": outcome.quantile_s(0.5),
        "first_audio_p95_s": outcome.quantile_s(0.95),
        "waited": outcome.waited / replies,
        "refused": outcome.refused,
        "held": outcome.held / outcome.rows,
        "new": outcome.fresh / outcome.rows,
        "mean_replicas": outcome.replica_s / outcome.seconds,
        "most_replicas": outcome.most_replicas,
        "loads": outcome.loads,
        "machine_h_per_1m_min": 1e6 * outcome.replica_s / 3600 / machines / speech_min,
    }


def tables(rows: Sequence[Row], price: float | None) -> list[str]:
    """Format the rows as Markdown tables, every line labelled as simulated."""
    cost = "machine hours" if price is None else "cost"
    common = f"first audio s p50, p95 | rows held | {cost} of 1M min"
    lines = []
    for kind, titles in (
        ("busy hour", "affinity | replicas | replies/s a replica"),
        ("day", "affinity | replicas mean, most | loads | waited, refused"),
    ):
        head = f"| simulated {kind} | cores | at once | {titles} | {common} |"
        lines += [head, "| --- | --- | ---: | --- |" + " ---: |" * (head.count("|") - 5)]
        for r in rows:
            if r["kind"] != kind:
                continue
            affinity = "yes" if r["affinity"] else "no"
            own = f"{affinity} | {r['replicas']} | {r['replies_per_s_replica']:.2f}"
            if kind == "day":
                own = f"{affinity} | {r['mean_replicas']:.1f}, {r['most_replicas']} | {r['loads']}"
                own += f" | {100 * r['waited']:.1f} %, {r['refused']}"
            hours = r["machine_h_per_1m_min"]
            lines.append(
                f"| {r['profile']} | {r['placement']} | {r['at_once']} | {own} "
                f"| {r['first_audio_p50_s']:.2f}, {r['first_audio_p95_s']:.2f} "
                f"| {100 * r['held']:.0f} % of {100 * (1 - r['new']):.0f} % "
                f"| {hours if price is None else hours * price:,.0f} |"
            )
        lines.append("")
    return lines


if __name__ == "__main__":
    sys.exit(main())
