"""Runaway speech over the checkpoint that ships, whose logits are forced where it would end."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.runtime.runaway import CEILING, CYCLE_FRAMES, SILENT_FRAMES, SpokenPace
from testing.http_server import client_of, serving
from testing.realtime import calling, sound_of
from testing.runaways import KINDS, SLOTS, good_replies, made_replies, running_away

WORDS = "three five"


@pytest.fixture(scope="module")
def silent() -> Iterator[Qwen3Omni]:
    with running_away("silence") as (omni, _):
        yield omni


def test_no_good_reply_is_cut() -> None:
    with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=SLOTS) as omni:
        good = list(islice(good_replies(omni, seed=1), 24))
    assert Counter(result.talker_finish_reason for result in good) == {"stop": 24}


@pytest.mark.parametrize("kind", KINDS)
def test_every_made_runaway_ends_and_all_that_was_said_is_kept(kind) -> None:
    for made in made_replies(kind, 4):
        result, frames = made.result, len(made.result.codes)
        assert result.talker_finish_reason == "runaway"
        assert result.text == made.text.words
        words = frames if kind == "noise" else frames - made.said
        longest = CEILING * SpokenPace().longest_frames(result.timings.text_tokens)
        most = {"silence": SILENT_FRAMES, "cycle": CYCLE_FRAMES, "noise": int(longest) + 1}
        assert words <= most[kind]
        assert frames >= made.said - 1, "of its last silence a frame may be cut"


def test_a_session_keeps_the_whole_text_and_goes_on(silent) -> None:
    with silent.session(seed=0) as session:
        for words in ("say three five", "say red"):
            session.append(words)
            result = list(session.respond())[-1].result  # type: ignore[union-attr]
            assert result.talker_finish_reason == "runaway"
            reply = session.turns[-1]
            assert reply.text == result.text == words.removeprefix("say ")  # type: ignore[union-attr]
            assert not reply.spoken_bytes, "silence is no pace"  # type: ignore[union-attr]
        assert session._pace == SpokenPace()


def test_a_piece_that_runs_away_does_not_stop_the_next_one(silent) -> None:
    words = "one two three four five six seven eight nine"
    result = silent.say(words, seed=0)
    assert (result.text, result.talker_finish_reason) == (words, "runaway")
    assert len(result.audio) == 1920 * len(result.codes) - 555
    assert silent.say(words, seed=0, talker_max_new_tokens=20).talker_finish_reason == "length"


def test_clients_get_an_end_that_they_know(silent) -> None:
    """Text and speech are complete: the metric and the log say what the speech was."""
    asked: Any = {"role": "user", "content": f"say {WORDS}"}
    with serving(silent) as server, client_of(server) as client:
        answer = client.chat.completions.create(
            model="qwen3-omni",
            messages=[asked],
            modalities=["text", "audio"],
            audio={"voice": "ethan", "format": "pcm16"},
            extra_body={"seed": 0},
        )
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.audio.transcript == WORDS
        with calling(server) as caller:
            caller.update(seed=0)
            caller.write(f"say {WORDS}")
            events = caller.answer()
        assert events[-1].response.status == "completed"
        assert np.frombuffer(sound_of(events), np.int16).any()
        count = server.service.metrics.registry.get_sample_value
        assert count("qwen3_omni_runaway_replies_total") == 2
