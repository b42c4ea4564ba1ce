"""Whole sessions: each turn's reply is the one that its messages get at once, and the reference's.

Heard by the judge of train/judge.py, too: three turns of the checkpoint that speaks.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.events import Finished
from qwen3_omni_neuron.session import Session
from qwen3_omni_neuron.verification.oracle import Reference
from testing.media_cases import CASES, IMAGE, audio, image, text, video, write_deeper_checkpoint
from testing.repeats import examples
from testing.replies import GREEDY, assert_alike, assert_same, last

LIMITS: dict[str, Any] = {**GREEDY, "thinker_max_new_tokens": 5, "talker_max_new_tokens": 8}
SAID = [[text("Hello")], [IMAGE, text("What is it?")], [audio(1.3)], [video(4, 2.0)], [text("?")]]


@pytest.fixture(scope="module")
def deeper(tmp_path_factory) -> Iterator[tuple[Qwen3Omni, Reference]]:
    """Ours and the oracle, over a checkpoint on which both lines of transformers agree."""
    folder = write_deeper_checkpoint(tmp_path_factory.mktemp("deeper"))
    with Qwen3Omni.load(folder, dtype="float32", max_concurrency=2) as omni:
        yield omni, Reference(folder)


@dataclass(frozen=True)
class Speech:
    """Noise that swells and fades, and where it is cut into pieces, in shares of its length."""

    seconds: float
    seed: int
    cuts: tuple[float, ...]

    def say(self, session: Session, rate: int) -> None:
        samples = np.random.default_rng(self.seed).standard_normal(round(rate * self.seconds))
        loudness = np.sin(np.arange(len(samples)) / 9000 + self.seed)
        samples = (samples * np.exp(5 * loudness - 5)).astype(np.float32)
        say(session, samples, rate, self.cuts)


def say(session: Session, samples: np.ndarray, rate: float, cuts: Sequence[float]) -> None:
    """Append a clip in pieces."""
    for piece in np.split(samples, sorted(round(cut * len(samples)) for cut in cuts)):
        session.append_audio(piece, rate)


def cuts(dice: random.Random) -> list[float]:
    return [dice.random() for _ in range(dice.randrange(20))]


CUTS = st.lists(st.floats(0, 1), max_size=12).map(tuple)
SPEECH = st.builds(Speech, st.sampled_from((0.3, 1.0, 2.51, 9.0)), st.integers(0, 98), CUTS)


@dataclass(frozen=True)
class Turn:
    """Turn of a user, and the reply to it.

    said: speech, and content. events: of the reply before a barge-in. over: what is said over it
    then. heard: share of the reply's audio, None where nobody says so.
    """

    said: list[Any]
    events: int
    over: Speech | None
    heard: float | None


TURNS = st.builds(
    Turn,
    st.lists(st.one_of(SPEECH, st.sampled_from(SAID)), min_size=1, max_size=3),
    st.sampled_from((1, 4, 99)),
    st.one_of(st.none(), SPEECH),
    st.one_of(st.none(), st.floats(0, 1)),
)


def test_any_session_is_its_messages_given_at_once(omni) -> None:
    @settings(max_examples=examples(40))
    @given(
        st.sampled_from((8000, 16000, 24000, 44100)),
        st.sampled_from((None, "Be brief.")),
        st.lists(TURNS, min_size=1, max_size=5),
    )
    def hold(rate: int, system: str | None, turns: list[Turn]) -> None:
        with omni.session(system, **LIMITS) as session:
            for turn in turns:
                for said in turn.said:
                    if isinstance(said, Speech):
                        said.say(session, rate)
                    else:
                        session.append(said)
                stream = session.respond(chunk_frames=[2])
                finished: list[SpeechResult] = []
                for number, event in enumerate(stream):
                    if number == turn.events:
                        if turn.over is not None:
                            turn.over.say(session, rate)
                        stream.close()
                        break
                    if isinstance(event, Finished):
                        finished.append(event.result)
                # With all samples of the last clip, which may have ended with the turn alone.
                before = session.messages[:-1]
                for result in finished:
                    assert_alike(result, omni.generate_audio(before, **LIMITS))
                if turn.heard is not None:
                    session.heard(turn.heard * session._reply.audio_s)
            # Whatever the last turn left: an answer to it, without the prefix cache.
            session.append("Well?")
            assert_alike(
                last(session.respond()), omni.generate_audio(session.messages[:-1], **LIMITS)
            )

    hold()


def said_in_turns(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for message in messages:
        if message["role"] == "user":
            yield message["content"]


@pytest.mark.parametrize("name", ["audio", "images-and-audio", "video", "five-turns"])
def test_every_turn_is_the_references(deeper, name) -> None:
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
                    say(session, item["audio"], item["sampling_rate"], cuts(dice))
                else:
                    session.append([item])
            messages = session.messages
            ours = last(session.respond())
            prompt = omni.prompt_builder.prompt(messages)
            limits = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 8}
            theirs = reference.generate(prompt, **limits, **(grids if prompt.videos else {}))
            assert ours.token_ids == theirs.token_ids[:5]
            assert_same(ours, theirs, reference)
            session.heard(len(ours.audio) / 24000 * dice.choice((0.5, 1.0)))
