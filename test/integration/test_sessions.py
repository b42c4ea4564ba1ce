"""Whole sessions: each turn's reply is the one that its messages get at once, and the reference's.

Heard by the judge of train/judge.py, too: three turns of the checkpoint that speaks.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni, SpeechResult
from qwen3_omni_neuron.events import AudioChunk, Finished
from qwen3_omni_neuron.session import Session
from testing.media_cases import (
    CASES,
    IMAGE,
    QUESTION_WAV,
    audio,
    image,
    text,
    video,
    write_deeper_checkpoint,
)
from testing.oracle import Reference
from testing.replies import GREEDY, assert_same
from train.judge import Judge
from train.speech import MEASURING, spoken_clip

LIMITS: dict[str, Any] = {**GREEDY, "thinker_max_new_tokens": 5, "talker_max_new_tokens": 8}
RATE = 16000
SAID = [[text("Hello")], [IMAGE, text("What is it?")], [audio(1.3)], [video(4, 2.0)], [text("?")]]


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Qwen3Omni, Reference]]:
    """Ours and the oracle, over a checkpoint on which both lines of transformers agree."""
    folder = write_deeper_checkpoint(tmp_path_factory.mktemp("deeper"))
    with Qwen3Omni.load(folder, dtype="float32", max_concurrency=2) as omni:
        yield omni, Reference(folder)


def last(stream: Any) -> SpeechResult:
    *_, event = stream
    assert isinstance(event, Finished)
    return event.result


def say(session: Session, samples: np.ndarray, rate: float, dice: random.Random) -> None:
    """Append a clip in pieces of any length."""
    at = 0
    while at < len(samples):
        size = dice.choice((1, 160, 320, 3200, 44_100))
        session.append_audio(samples[at : at + size], rate)
        at += size


def speech(dice: random.Random, rate: int) -> np.ndarray:
    samples = np.random.default_rng(dice.randrange(99)).standard_normal(
        round(rate * dice.choice((0.3, 1.0, 2.51, 9.0)))
    )
    loudness = np.sin(np.arange(len(samples)) / 9000 + dice.random())
    return (samples * np.exp(5 * loudness - 5)).astype(np.float32)


def assert_same_reply(ours: SpeechResult, expected: SpeechResult) -> None:
    assert ours.token_ids == expected.token_ids
    assert ours.codes.tolist() == expected.codes.tolist()
    assert ours.text == expected.text


@pytest.mark.parametrize("seed", range(8))
def test_any_session_is_its_messages_given_at_once(omni: Qwen3Omni, seed: int) -> None:
    """Random turns, pieces, barge-ins, seconds heard, and appends over a reply that streams."""
    dice = random.Random(seed)
    rate = dice.choice((8000, 16000, 24000, 44100))
    with omni.session(dice.choice((None, "Be brief.")), **LIMITS) as session:
        for _ in range(4):
            for _ in range(dice.choice((1, 1, 2, 3))):
                if dice.random() < 0.5:
                    say(session, speech(dice, rate), rate, dice)
                else:
                    session.append(dice.choice(SAID))
            before = session.messages
            stream = session.respond(chunk_frames=[2])
            stop_at = dice.choice((1, 4, 99, 99))
            for number, event in enumerate(stream):
                if number == stop_at:
                    if dice.random() < 0.5:
                        say(session, speech(dice, rate), rate, dice)
                    stream.close()
                    break
                if isinstance(event, Finished):
                    assert_same_reply(event.result, omni.generate_audio(before, **LIMITS))
            if dice.random() < 0.5:
                assert session._reply is not None
                session.heard(dice.random() * session._reply.audio_s)
        # Whatever the last turn left: an answer to it, without reuse.
        session.append("Well?")
        assert_same_reply(
            last(session.respond()), omni.generate_audio(session.messages[:-1], **LIMITS)
        )


def said_in_turns(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for message in messages:
        if message["role"] == "user":
            yield message["content"]


@pytest.mark.parametrize("name", ["audio", "images-and-audio", "video", "five-turns"])
def test_every_turn_is_the_references(deeper: tuple[Qwen3Omni, Reference], name: str) -> None:
    """The reference gets the prompt of all messages at once."""
    omni, reference = deeper
    turns: dict[str, list[list[dict[str, Any]]]] = {
        "audio": [[audio(1.7)], [audio(2.1, 700.0), text("Which is higher?")], [audio(0.6)]],
        "images-and-audio": [[IMAGE], [audio(1.3), text("Its sound?")], [image(64, 96, 2)]],
        "video": [[text("Look.")], [video(6, 2.0), text("What happens?")], [audio(1.1)]],
        "five-turns": list(said_in_turns(CASES["five-turns"].messages)),
    }
    dice = random.Random(name)
    grids = {"video_second_per_grid": torch.tensor([1.0])} if name == "video" else {}
    with omni.session("Be brief.", **LIMITS) as session:
        for content in turns[name]:
            for item in content:
                if item["type"] == "audio" and not isinstance(item["audio"], str):
                    say(session, item["audio"], item["sampling_rate"], dice)
                else:
                    session.append([item])
            messages = session.messages
            ours = last(session.respond())
            prompt = omni.conversation.prompt(messages)
            limits = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 8}
            theirs = reference.generate(prompt, **limits, **(grids if prompt.videos else {}))
            assert ours.token_ids == theirs.token_ids[:5]
            assert_same(ours, theirs, reference)
            session.heard(len(ours.audio) / 24000 * dice.choice((0.5, 1.0)))


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.fixture(scope="module")
def speaking() -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(SPEAKING_CHECKPOINT, dtype="float32", max_concurrency=2) as omni:
        yield omni


def words(judge: Judge, samples: np.ndarray) -> str:
    return " ".join(word.word for word in judge.hear(samples))


def test_three_turns_with_a_barge_in_say_the_right_words(speaking: Qwen3Omni, judge: Judge) -> None:
    """The second question interrupts a reply, is spoken piece by piece, and so is the third."""
    dice = random.Random(1)
    with speaking.session(seed=0, talker_max_new_tokens=100) as session:
        session.append("say three five seven blue")
        spoken = []
        with session.respond(chunk_frames=[4]) as stream:
            for event in stream:
                if isinstance(event, AudioChunk):
                    spoken.append(event.samples)
                if sum(map(len, spoken)) > 14000:
                    break
        assert words(judge, np.concatenate(spoken)).startswith("three")
        interrupted = session.messages[-1]["content"]
        assert "three five seven blue".startswith(interrupted)
        assert interrupted not in ("", "three five seven blue")
        say(session, spoken_clip("what is two plus four", MEASURING, dice), RATE, dice)
        result = last(session.respond())
        assert result.text == words(judge, result.audio) == "six"
        # Its training had one earlier turn at most: what it answers in a third one is its own.
        say(session, spoken_clip("say red green", MEASURING, dice), RATE, dice)
        asked = session.messages
        result = last(session.respond())
        assert result.text == words(judge, result.audio)
        assert result.text == speaking.generate_text(asked, seed=0).text


def test_a_spoken_question_in_pieces_is_heard(speaking: Qwen3Omni, judge: Judge) -> None:
    import soundfile

    samples, rate = soundfile.read(QUESTION_WAV.with_name("sum.wav"), dtype="float32")
    with speaking.session(seed=0, talker_max_new_tokens=100) as session:
        say(session, samples, rate, random.Random(0))
        result = last(session.respond())
    assert result.text == words(judge, result.audio) == "eight"
