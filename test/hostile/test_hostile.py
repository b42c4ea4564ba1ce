"""Hostile requests of every kind, as `attack` sends them: what comes back, and what is left.

Times are the benchmark's. Here each kind is sent once to a server of the checkpoint that ships, a
process of its own; afterwards nothing may be held, no process may be another one, and a good
question gets the right answer.
"""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from test.hostile.attack import KINDS
from test.hostile.attacks.good_client import ANSWER
from test.hostile.attacks.kinds import Kind, restarted, unmet
from test.hostile.attacks.outcomes import Outcome, wrong_of
from test.hostile.attacks.target import NO_NGINX, ServerSpec, Target, target_of, waited
from testing.nginx import NGINX
from testing.repeats import again

OPTIONS = argparse.Namespace(dtype="auto", placement="shared", threads=1)
SECONDS = 120  # for what a request held to be given back: an encoder's call is not cut short
# Kinds of one server stand together: a fixture of the module keeps the last one.
ORDERED = sorted(KINDS, key=lambda kind: repr(kind.server))
# These are sent to a server in the process of the test, too, and to a pool of grammars.
AGAIN = ["slow-reader", "half-open", "realtime-unread", "grammar-slow"]
CASES = [again(kind) if kind.name in AGAIN else kind for kind in ORDERED]
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="no /proc, which Linux has"
)


class Servers:
    """The server of the last kind, which goes on for those that may share it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._target: Target | None = None

    def of(self, spec: ServerSpec) -> Target:
        target = self._target
        if target is None or target.spec != spec or spec.own or target.process.poll() is not None:
            self._stack.close()
            self._target = None
            made = target_of(spec, SPEAKING_CHECKPOINT, OPTIONS, short=True)
            target = self._target = self._stack.enter_context(made)
        return target

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.name)
def test_a_hostile_request_is_refused_in_the_right_shape_and_hurts_nobody(
    kind: Kind, servers: Servers
) -> None:
    if kind.server.proxy and NGINX is None:
        pytest.skip(NO_NGINX)
    if kind.server.proxy and shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not on PATH")
    target = servers.of(kind.server)
    stages = target.stages()
    outcomes = kind.attack(target)
    assert outcomes
    assert not unmet(kind, outcomes)
    assert not restarted(target, stages)
    if kind.server.ends_with is not None:
        assert target.process.poll() == kind.server.ends_with
        return
    assert waited(lambda: not any(target.counters().values()), SECONDS), target.counters()
    assert target.says() == ANSWER
    assert target.get("/health")[0] == target.get("/ready")[0] == 200


def test_names_of_kinds_are_words_of_their_own() -> None:
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names) > 30
    assert all(kind.sends and kind.allowed for kind in KINDS)


# What the kinds are judged by.

SHAPED = b'{"error": {"message": "too much", "type": "a", "param": null, "code": "b"}}'


def test_a_refusal_in_another_shape_is_seen() -> None:
    for status, headers, body, said in (
        (400, {}, SHAPED, ""),
        (503, {"retry-after": "1"}, SHAPED, ""),
        (429, {}, SHAPED, "429 without Retry-After"),
        (500, {}, b"Internal Server Error", "status 500"),
        (400, {}, b"Bad Request", "not OpenAI's shape"),
        (400, {"server": "nginx/1"}, b"<html>", ""),
        (400, {}, b'{"error": {"message": "a", "code": "b"}}', "without param, type"),
        (400, {}, SHAPED.replace(b"too much", b'File \\"/a/b.py\\", line 3'), "its message has"),
    ):
        wrong = wrong_of(status, headers, body)[1]
        assert wrong.startswith(said) and bool(wrong) == bool(said), body


def test_an_outcome_that_is_not_allowed_or_late_is_unmet() -> None:
    kind = Kind("a", "b", lambda _: [], frozenset(("refused",)))
    late = Outcome("refused", 400, "code", late_s=1.5, sent_bytes=100)
    assert not unmet(kind, [late])
    assert unmet(kind, [late], stall_s=0.0) == ["refused 1.5 s after its last byte"]
    assert not unmet(kind, [late], stall_s=1.0)
    assert not unmet(kind, [Outcome("refused", 400, late_s=1.5, sent_bytes=30 << 20)], stall_s=0.0)
    for bad in (Outcome("answered", 200), Outcome("cut"), Outcome("refused", wrong="status 500")):
        assert len(unmet(kind, [bad, bad])) == 1
    assert not unmet(kind, [Outcome("left"), Outcome("checked")])
