"""Stages whose process dies: what a client is told, and how soon the server knows."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse

from test.hostile.attacks.good_client import good_question
from test.hostile.attacks.kinds import Kind
from test.hostile.attacks.outcomes import (
    ANSWERED,
    REFUSED,
    SHAPE,
    SILENT,
    WAIT_S,
    Outcome,
    check,
    inner_of,
    wrong_of,
)
from test.hostile.attacks.target import ServerSpec, Target, stopped, waited
from testing.http_client import HttpClient

MODEL_DIED = 70  # exit status
KNOWN_S, END_S = 10.0, 20.0
STAGES = ("thinker", "talker", "vocoder")  # in the order in which their processes start


def dying(stage: str) -> Callable[[Target], list[Outcome]]:
    """Return an attack: a stage dies while a client streams."""

    def attack(target: Target) -> list[Outcome]:
        long = {"thinker_eos_token_id": 10**6, "thinker_max_new_tokens": 1500}
        body = {**good_question(True), **long, "talker_max_new_tokens": 4000}
        with HttpClient(target.url, target.key, timeout_s=WAIT_S) as client:
            answer = client.begin("/v1/chat/completions", body)
            answer.readline()
            os.kill(target.stages()[STAGES.index(stage)], signal.SIGSEGV)
            found = refusal_of(answer)
        return [found, *ended(target)]

    return attack


def refusal_of(answer: HTTPResponse) -> Outcome:
    """Read a streamed answer to its end. Returns the error that it ends with."""
    lines = []
    with contextlib.suppress(OSError, HTTPException):
        lines = [line for line in answer if line.startswith(b"data: {")]
    if answer.status != 200:
        headers = {name.lower(): value for name, value in answer.getheaders()}
        code, wrong = wrong_of(answer.status, headers, b"".join(lines))
        return Outcome(REFUSED, answer.status, code, wrong)
    error = json.loads(lines[-1][6:]).get("error") if lines else None
    if error is None:
        return Outcome(SILENT, 200, wrong="the stream ends without an error")
    missing = SHAPE - error.keys()
    wrong = f"without {', '.join(sorted(missing))}" if missing else inner_of(error["message"])
    return Outcome(REFUSED, 200, str(error["code"]), wrong)


def dying_idle(target: Target) -> list[Outcome]:
    """Kill a stage while nothing runs; only /ready is looked at."""
    os.kill(target.stages()[0], signal.SIGSEGV)
    start_s = time.monotonic()
    known = waited(lambda: not _ready(target), KNOWN_S)
    late = f"/ready said 200 for {time.monotonic() - start_s:.1f} s after a stage had died"
    return [check(known, late, "/ready"), *ended(target)]


def ended(target: Target) -> list[Outcome]:
    """Check that the server ends by itself, with the status of a model that died."""
    status = stopped(target.process, END_S)
    return [check(status == MODEL_DIED, f"the server's status is {status}", "exit")]


def _ready(target: Target) -> bool:
    try:
        return target.get("/ready", 5)[0] == 200
    except (OSError, HTTPException):
        return False


SPLIT = ServerSpec(split=True, own=True, ends_with=MODEL_DIED)
EITHER = frozenset((ANSWERED, REFUSED))
KINDS = (
    *(
        Kind(
            f"stage-dies-{stage}",
            f"SIGSEGV of the {stage} while a client streams",
            dying(stage),
            frozenset((REFUSED,)),
            SPLIT,
            good=False,
        )
        for stage in STAGES
    ),
    Kind(
        "stage-dies-idle",
        "SIGSEGV of a stage while nothing runs",
        dying_idle,
        EITHER,
        SPLIT,
        good=False,
    ),
)
