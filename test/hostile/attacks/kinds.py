"""Kinds of attacks, and how their outcomes are judged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from test.hostile.attacks.outcomes import CHECKED, LEFT, REFUSED, Outcome
from test.hostile.attacks.target import ServerSpec, Target

SHARED = ServerSpec()


@dataclass(frozen=True)
class Kind:
    """One kind of attack.

    sends: a short description. attack: runs it, and returns each client's outcome. allowed:
    outcomes that are right, words of `outcomes`. server: the server that it needs.
    good: whether a good client can stream meanwhile. fair: whether a good client's small chats are
    watched instead, which must not wait. most_mb: most memory that the server may take
    in addition; None: any. refused_within_s: time in which a refusal has to come; None: see
    Outcome.limit_s.
    """

    name: str
    sends: str
    attack: Callable[[Target], Sequence[Outcome]]
    allowed: frozenset[str]
    server: ServerSpec = SHARED
    good: bool = True
    fair: bool = False
    most_mb: float | None = None
    refused_within_s: float | None = None


def unmet(kind: Kind, outcomes: Sequence[Outcome], stall_s: float | None = None) -> list[str]:
    """Return what is wrong with the outcomes, each fault once.

    stall_s: how long an idle process stalled meanwhile; None: times are not checked.
    """
    found: dict[str, None] = {}
    late: dict[str, float] = {}
    for one in outcomes:
        name = f"{one.label}: " if one.label else ""
        if one.wrong:
            found[name + one.wrong] = None
        elif one.how not in kind.allowed | {LEFT, CHECKED}:
            found[f"{name}{one.how} {one.status or ''} {one.code}".strip()] = None
        elif (
            one.how == REFUSED
            and stall_s is not None
            and one.late_s
            > stall_s + (one.limit_s if kind.refused_within_s is None else kind.refused_within_s)
        ):
            late[name] = max(one.late_s, late.get(name, 0.0))
    return [*found, *(f"{k}refused {s:.1f} s after its last byte" for k, s in late.items())]


def restarted(target: Target, stages: Sequence[int]) -> list[str]:
    """Return which processes were replaced. stages: the processes before the attack."""
    status, wanted = target.process.poll(), target.spec.ends_with
    if status is not None:
        return [] if status == wanted else [f"the server ended with status {status}"]
    gone = [pid for pid in stages if pid not in target.stages()]
    return [f"{len(gone)} stages ended"] if gone and wanted is None else []
