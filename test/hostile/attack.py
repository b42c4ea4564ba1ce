"""Hostile requests of every kind against a server, while a good client streams speech.

    python -m test.hostile.attack --json hostile.json
    python -m test.hostile.attack --kind text-chat --kind silent-tls    # some of them

The server is a process of its own, with a key for the good client and one for the attacker; kinds
that need other settings have a server of their own. For each kind a line says: /health at p99 and
at worst; the good client's longest gap between two parts of its answers, with what it was alone;
memory at its peak and what is held half a minute later, both less what it was before; how long
after its last byte the latest refusal came; what came back; and which goals are not met, if any:

- /health within 100 ms at p99 and 300 ms at worst, and the good client's gaps at most 200 ms longer
  than alone, all less what a process that does nothing stalls meanwhile;
- for kinds of an owner: another owner's small chats at p99 within three times what they take alone
  or 50 ms, and /health within 250 ms at worst, less the same;
- memory back within 50 MB of before after 30 s;
- a refusal is a 4xx in OpenAI's shape, or a 503 with Retry-After; on a WebSocket an error event or
  a close; within 1 s of its last byte, 3 s for many megabytes, 60 s for a grammar; its message has
  no stack or path;
- connections that are silent or half open are closed; neither the server nor a stage starts anew.

The good client's answers are right only where the checkpoint that ships gives them (no --model).
All goes over the loopback, in bounded numbers and times.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.cli import model_arguments
from test.hostile.attacks import connections, grammars, media, owners, sockets, texts
from test.hostile.attacks.kinds import Kind, restarted, unmet
from test.hostile.attacks.outcomes import FAILED, REFUSED, Outcome
from test.hostile.attacks.over_socket import session
from test.hostile.attacks.target import Peak, Target, target_of, waited
from test.hostile.attacks.watching import Seen, Watcher, seen
from test.hostile.slots import fill_slots
from testing.command_line import Figures, Row, parser_of, run
from testing.headlines import headline
from testing.server_process import SLOTS

HEALTH_P99_S, HEALTH_WORST_S, GAP_S = 0.1, 0.3, 0.2
FAIR_HEALTH_S, CHAT_P99_S, TIMES_ALONE = 0.25, 0.05, 3
HELD_MB, HELD_AFTER_S = 50.0, 30.0
ALONE_S, SETTLE_S, AFTER_S = 5.0, 0.5, 2.0  # seconds before the first kind, and around each
CHATS_S = 3.0  # before a kind of an owner
KINDS: tuple[Kind, ...] = (
    *texts.KINDS,
    *media.KINDS,
    *grammars.KINDS,
    *connections.KINDS,
    *sockets.KINDS,
    *owners.KINDS,
)
TIMES = (
    *("health_p99", "health_worst", "idle_p99", "idle_worst", "gap", "gap_alone", "refused"),
    *("chat_p99", "chat_worst", "chat_alone"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("test.hostile.attack", __doc__)
    model_arguments.add_model_arguments(parser)
    names = [kind.name for kind in KINDS]
    text = f"send this kind; repeatable; default: all. {', '.join(names)}"
    parser.add_argument(
        "--kind", action="append", choices=names, metavar="NAME", dest="kinds", help=text
    )
    return run("test.hostile.attack", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Send every chosen kind; kinds that may share a server are sent to the same one."""
    chosen = [kind for kind in KINDS if options.kinds is None or kind.name in options.kinds]
    checkpoint = options.model or SPEAKING_CHECKPOINT
    rows: list[Row] = []
    chosen.sort(key=lambda kind: repr(kind.server))  # stable: otherwise in the table's order
    for spec, group in groupby(chosen, key=lambda kind: kind.server):
        left = list(group)
        while left:  # a new server after a kind with its own, or if it has ended
            with target_of(spec, checkpoint, options) as target:
                done = measured_on(target, left[:1] if spec.own else left)
            rows, left = rows + done, left[len(done) :]
    met = sum(not row["unmet"] for row in rows)
    headlines = [headline("kinds whose limits are met", [met], "", f"goal {len(rows)}")]
    return rows, {"kinds": len(rows), "met": met}, headlines


def measured_on(target: Target, kinds: Sequence[Kind]) -> list[Row]:
    """Send kinds to one server, one after the other, until it has ended."""
    rows: list[Row] = []
    fill_slots(SLOTS, target.url, target.key)
    target.says()
    with session(target):  # the first session loads what detects turns
        pass
    good = "good" if any(kind.good for kind in kinds) else "idle"
    with watchers_of(target, good) as watchers:
        start_s = time.monotonic()
        time.sleep(ALONE_S)
    _, gaps, _ = (seen(one.samples, start_s + 1, time.monotonic()) for one in watchers)
    for kind in kinds:
        rows.append(measured(target, kind, gaps))
        print(line_of(rows[-1]), flush=True)
        if target.process.poll() is not None:
            break
    return rows


@contextmanager
def watchers_of(target: Target, good: str) -> Iterator[list[Watcher]]:
    """Watch /health, a good client, and a process that does nothing, while the block runs.

    good: name of the good client's watcher; "idle" for a second process that does nothing.
    """
    where = target.url, target.good_key
    watchers = [Watcher(name, *where) for name in ("health", good, "idle")]
    with ExitStack() as stack:
        for one in watchers:
            stack.enter_context(one)
        yield watchers


def measured(target: Target, kind: Kind, alone: Seen) -> Row:
    """Send a kind, and watch the server meanwhile and after. alone: the good client's times."""
    before_mb, stages = target.held_mb(), target.stages()
    name = "chats" if kind.fair else "good" if kind.good else "idle"
    with watchers_of(target, name) as watchers, Peak(target) as peak:
        time.sleep(CHATS_S if kind.fair else SETTLE_S)
        start_s = time.monotonic()
        outcomes = attacked(target, kind)
        end_s = time.monotonic()
        time.sleep(AFTER_S)
    health, good, idle = (seen(one.samples, start_s, end_s + AFTER_S) for one in watchers)
    if kind.fair:
        alone = seen(watchers[1].samples, start_s - CHATS_S + SETTLE_S, start_s)
    ends = kind.server.ends_with is not None
    waited(lambda: target.held_mb() <= before_mb + HELD_MB, HELD_AFTER_S)
    back_s, held_mb = time.monotonic() - end_s, target.held_mb() - before_mb
    facts = {
        "health p99": kind.fair or health.p99_s - idle.p99_s <= HEALTH_P99_S,
        "health worst": health.worst_s - idle.worst_s
        <= (FAIR_HEALTH_S if kind.fair else HEALTH_WORST_S),
        f"health: {', '.join(health.wrong)}": ends or not health.wrong,
        "good client's gap": kind.fair or good.worst_s - alone.worst_s - idle.worst_s <= GAP_S,
        "chats": not kind.fair
        or good.p99_s - idle.p99_s <= max(CHAT_P99_S, TIMES_ALONE * alone.p99_s),
        f"good client: {', '.join(good.wrong)}": ends or not good.wrong,
        "memory held": held_mb <= HELD_MB,
        f"peak above {kind.most_mb} MB": peak.most_mb - before_mb <= (kind.most_mb or 1e9),
    }
    wrong = [name for name, met in facts.items() if not met]
    wrong += [*unmet(kind, outcomes, idle.worst_s), *restarted(target, stages)]
    return {
        "kind": kind.name,
        "sends": kind.sends,
        "seconds": end_s - start_s,
        "health_p99_s": health.p99_s,
        "health_worst_s": health.worst_s,
        "idle_p99_s": idle.p99_s,
        "idle_worst_s": idle.worst_s,
        "gap_s": good.worst_s if kind.good else None,
        "gap_alone_s": alone.worst_s if kind.good else None,
        "chat_p99_s": good.p99_s if kind.fair else None,
        "chat_worst_s": good.worst_s if kind.fair else None,
        "chat_alone_s": alone.p99_s if kind.fair else None,
        "before_mb": before_mb,
        "peak_mb": peak.most_mb - before_mb,
        "held_mb": held_mb,
        "back_s": back_s,
        "refused_s": max((one.late_s for one in outcomes if one.how == REFUSED), default=None),
        "outcomes": dict(Counter(one.words for one in outcomes)),
        "unmet": wrong,
    }


def attacked(target: Target, kind: Kind) -> list[Outcome]:
    """Run a kind's attack. An attack that fails by itself is an outcome, too."""
    try:
        return list(kind.attack(target))
    except Exception as error:
        return [Outcome(FAILED, wrong=f"the attack failed: {type(error).__name__}: {error}"[:200])]


def line_of(row: Row) -> str:
    """Return a row as a paragraph."""
    ms = {k: "-" if row[f"{k}_s"] is None else f"{1000 * row[f'{k}_s']:.0f}" for k in TIMES}
    came = "; ".join(f"{words} x{n}" for words, n in row["outcomes"].items())
    lines = [
        f"{row['kind']}: {row['sends']} ({row['seconds']:.1f} s)",
        f"  health {ms['health_p99']} ms p99, {ms['health_worst']} worst; "
        f"idle {ms['idle_p99']}, {ms['idle_worst']}; gap {ms['gap']}, alone {ms['gap_alone']}; "
        f"chats {ms['chat_p99']} p99, {ms['chat_worst']} worst, alone {ms['chat_alone']}; "
        f"refused after {ms['refused']}; memory +{row['peak_mb']:.0f} MB, "
        f"+{row['held_mb']:.0f} after {row['back_s']:.0f} s",
        f"  came back: {came}",
        f"  NOT MET: {'; '.join(row['unmet'])}" if row["unmet"] else "  all met",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
