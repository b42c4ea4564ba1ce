"""A session that was saved goes on after a restart as the one that was not."""

from collections.abc import Iterator

import pytest

from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.events import AudioChunk, TextDelta
from qwen3_omni_neuron.session import Session
from testing.media_cases import IMAGE, audio, text, tone
from testing.replies import GREEDY, assert_alike, last

LIMITS = {"thinker_max_new_tokens": 12, "talker_max_new_tokens": 16, "runaway_speech": "keep"}
SEEDED = {"seed": 3, "thinker_do_sample": True, "thinker_temperature": 2.0}
SHORT_HISTORY = {
    "type": "retention_ratio",
    "retention_ratio": 0.8,
    "token_limits": {"post_instructions": 60},
}


@pytest.fixture
def restarted(checkpoint) -> Iterator[Qwen3Omni]:
    """Another load of the checkpoint of `omni`, which has no rows of any conversation."""
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=1) as omni:
        yield omni


def begin(session: Session) -> None:
    """Hold two turns, the second reply of which is interrupted, and begin a third turn."""
    session.append([IMAGE, audio(1.3), text("Look and listen.")])
    last(session.respond())
    session.append_audio(tone(0.9, 700.0), 22050)
    chunks = texts = 0
    with session.respond(chunk_frames=[2]) as stream:
        for event in stream:
            chunks += isinstance(event, AudioChunk)
            texts += isinstance(event, TextDelta)
            if chunks >= 3 and texts >= 2:  # a part of the text is heard, and a part is not
                break
    session.heard(0.3)
    session.append([audio(0.5, 900.0)])


def go_on(session: Session) -> list[SpeechResult]:
    """Answer the third turn and two more."""
    session.append("And this?")
    results = [last(session.respond())]
    session.heard(0.1)
    session.append_audio(tone(1.7, 500.0), 16000)
    results.append(last(session.respond()))
    session.append("Well?")
    return [*results, last(session.respond())]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param({**SEEDED, "truncation": SHORT_HISTORY}, id="seeded-and-truncated"),
    ],
)
def test_replies_after_a_restart_are_those_of_the_session_that_went_on(
    omni, restarted, options, tmp_path
) -> None:
    with omni.session("Be brief.", **LIMITS, **options) as session:
        begin(session)
        heard = session.messages[4]["content"]
        assert session.turns[3].stored["complete"] is False
        assert 0 < len(heard) < len("".join(session.turns[3].stored["deltas"]))
        session.save(tmp_path / "session")
        expected = go_on(session)
    with restarted.restore_session(tmp_path / "session") as session:
        found = go_on(session)
    for ours, theirs in zip(found, expected, strict=True):
        assert_alike(ours, theirs, atol=0)
        assert len(ours.codes) > 0
    assert found[0].timings.reused_tokens == 0 < expected[0].timings.reused_tokens
    whole = [result.timings.prompt_tokens for result in found]
    assert (whole == sorted(whole)) is ("truncation" not in options), "a turn was dropped or not"
    assert found[1].timings.reused_tokens > 0, "a restored session has rows again"
