"""Eight sessions at random over four slots: nothing is left, and nobody is hurt by the others."""

import gc
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron import Finished, Qwen3Omni, SpeechResult
from qwen3_omni_neuron.errors import MessageError
from qwen3_omni_neuron.session import Session
from testing.media_cases import IMAGE, RATE, tone
from testing.memory import allocated_mb
from testing.repeats import RUNS_ALL

ROUNDS = 300 if RUNS_ALL else 96
SESSIONS, SLOTS = 8, 4
LIMITS: dict[str, Any] = {"thinker_max_new_tokens": 5, "talker_max_new_tokens": 8}
CHECKED = 12  # replies that are computed anew and compared

Answered = tuple[list[dict[str, Any]], int, SpeechResult]
"""The messages of a reply that came to its end, its seed, and the reply."""


@pytest.fixture
def anew(checkpoint: Path) -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(checkpoint, reuse=False, max_concurrency=1) as omni:
        yield omni


def talk(omni: Qwen3Omni, rounds: int, dice: random.Random, answered: list[Answered]) -> None:
    """Hold one conversation after the other, for so many rounds in all."""
    while rounds > 0:
        session = omni.session(dice.choice((None, "Be brief.")), **LIMITS)
        for _ in range(dice.randrange(1, 6)):
            rounds -= 1
            say(session, dice)
            if dice.random() < 0.1:
                break  # closed before it was answered
            with suppress(MessageError):  # nothing was said
                listen(session, dice, answered)
            if dice.random() < 0.1:
                break  # closed while it streams, or after
        session.close()


def say(session: Session, dice: random.Random) -> None:
    if dice.random() < 0.5:
        session.append(dice.choice(("Hello?", "Why?", [IMAGE])))
    if dice.random() < 0.7:
        speech = tone(dice.uniform(0.2, 9.0), dice.uniform(200, 300))
        for piece in np.array_split(speech, dice.randrange(1, 9)):
            session.append_audio(piece, RATE)


def listen(session: Session, dice: random.Random, answered: list[Answered]) -> None:
    """Take some of a reply's events, or all; then stop it, or leave it as it is."""
    seed, events = dice.randrange(1000), dice.choice((0, 1, 3, 1000, 1000))
    stream = session.respond(seed=seed, speak=dice.random() < 0.8)
    for event, _ in zip(stream, range(events), strict=False):
        if isinstance(event, Finished) and event.result.codes.size:
            answered.append((session.messages[:-1], seed, event.result))
    if dice.random() < 0.8:
        stream.close()
        with suppress(MessageError):  # a reply in text
            session.heard(0.0)


def run(omni: Qwen3Omni, rounds: int, seed: int) -> list[Answered]:
    """Run the sessions, each in a thread of its own. Returns replies that came to their end."""
    answered: list[Answered] = []
    failed: list[BaseException] = []

    def one(number: int) -> None:
        try:
            talk(omni, rounds // SESSIONS, random.Random(100 * seed + number), answered)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(SESSIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a session hangs"
    if failed:
        raise failed[0]
    return answered


def test_rounds_of_many_sessions_leave_nothing(checkpoint: Path, anew: Qwen3Omni) -> None:
    with Qwen3Omni.load(checkpoint, max_concurrency=SLOTS) as omni:
        run(omni, 96, seed=0)  # until all that grows once has grown
        threads, before_mb = threading.active_count(), memory_mb()
        answered = run(omni, ROUNDS, seed=1)
        assert_idle(omni)
        assert threading.active_count() == threads
        assert len(answered) > ROUNDS / 10
        for messages, seed, result in answered[:: max(1, len(answered) // CHECKED)]:
            again = anew.generate_audio(messages, seed=seed, **LIMITS)
            assert again.token_ids == result.token_ids
            assert np.array_equal(again.codes, result.codes)
        del answered, messages, result, again
        # The prompts and hidden states that four slots keep are of other lengths now.
        assert memory_mb() - before_mb < 10


def assert_idle(omni: Qwen3Omni) -> None:
    """Wait until closed requests have left the stages, and assert that none holds a slot."""
    pipeline = omni._pipeline
    with pipeline._lock:
        for live in list(pipeline._running):
            while live.holders:
                assert live.output.changed.wait(30), "a closed session's request goes on"
        assert sorted(pipeline._free_slots) == list(range(SLOTS))
        assert not pipeline._queue


def memory_mb() -> float:
    """Return what malloc has given out, 0 where that can't be asked."""
    gc.collect()
    return allocated_mb() or 0.0
