"""Grammars that end, hold or fill the process that compiles them, or make slow masks."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from test.hostile.attacks.kinds import Kind
from test.hostile.attacks.outcomes import ANSWERED, LEFT, REFUSED, Outcome
from test.hostile.attacks.over_http import chat
from test.hostile.attacks.target import Target
from test.hostile.attacks.texts import ASK, realtime, text_item

LEAST = -(2**63)
CHAIN = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(10_000)) + 'a10000: "x"'
PATTERNS = {f"^a{i}.*b{i}$": {"type": "integer"} for i in range(400)}
CRASHES: Sequence[tuple[str, dict[str, Any]]] = (
    ("const", {"json": {"type": "integer", "const": LEAST}}),
    ("minimum", {"json": {"type": "integer", "minimum": LEAST, "maximum": LEAST}}),
    ("chain", {"lark": CHAIN}),
)
SLOW: Sequence[tuple[str, dict[str, Any]]] = (
    ("multiple", {"json": {"type": "integer", "multipleOf": 2**31}}),
    ("patterns", {"json": {"type": "object", "patternProperties": PATTERNS}}),
    ("optional letters", {"lark": "start: A\nA: " + '"x"? ' * 20_000}),
    ("billion letters", {"regex": "a{1000000000}"}),
)
# A grammar is compiled at the lowest priority, for 4 seconds of a processor's time at most.
COMPILED_WITHIN_S = 60.0


def crashing(target: Target) -> list[Outcome]:
    """Send grammars that end the process that compiles them, one after the other."""
    schema = {"name": "x", "schema": CRASHES[0][1]["json"]}
    wanted = {"type": "json_schema", "json_schema": schema}
    found = [chat(target, "response_format", response_format=wanted)]
    return found + [chat(target, label, grammar=grammar) for label, grammar in CRASHES]


def slow(wait_s: float | None = None) -> Callable[[Target], list[Outcome]]:
    """Return an attack: slow grammars at once. wait_s: when their clients leave, None: never."""

    def attack(target: Target) -> list[Outcome]:
        def sent(case: tuple[str, dict[str, Any]]) -> Outcome:
            left: dict[str, Any] = {} if wait_s is None else {"wait_s": wait_s, "leave": True}
            return chat(target, case[0], grammar=case[1], **left)

        with ThreadPoolExecutor(len(SLOW)) as pool:
            return list(pool.map(sent, SLOW))

    return attack


IN_A_SESSION = realtime(
    ("session.update", {"session": {"grammar": CRASHES[0][1]}}), text_item("hello"), ASK
)
KINDS = (
    Kind("grammar-realtime", "the first of them in a session", IN_A_SESSION, frozenset((REFUSED,))),
    Kind(
        "grammar-crash",
        "grammars that end what compiles them",
        crashing,
        frozenset((REFUSED,)),
        refused_within_s=COMPILED_WITHIN_S,
    ),
    Kind(
        "grammar-slow",
        "four slow or large grammars at once",
        slow(),
        frozenset((ANSWERED, REFUSED)),
        refused_within_s=COMPILED_WITHIN_S,
    ),
    Kind("grammar-left", "the same, left after 1 s", slow(1.0), frozenset((LEFT, REFUSED))),
)
