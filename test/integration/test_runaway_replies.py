"""Runaway speech over the checkpoint that ships, whose logits are forced where it would end.

`python -m testing.runaways` does the same with 2,000 good replies and 100 made ones.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.runtime.runaway import CEILING, CYCLE_FRAMES, SILENT_FRAMES, SpokenPace
from testing.http_server import client_of, serving
from testing.realtime import calling, sound_of
from testing.runaways import (
    KINDS,
    SLOTS,
    good_replies,
    made_replies,
    results_of,
    running_away,
)

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
def test_every_made_runaway_ends_and_all_that_was_said_is_kept(kind: str) -> None:
    for made in made_replies(kind, 4):
        result, frames = made.result, len(made.result.codes)
        assert result.talker_finish_reason == "runaway"
        assert result.text == made.text.words
        words = frames if kind == "noise" else frames - made.said
        longest = CEILING * SpokenPace().longest_frames(result.timings.text_tokens)
        most = {"silence": SILENT_FRAMES, "cycle": CYCLE_FRAMES, "noise": int(longest) + 1}
        assert words <= most[kind]
        assert frames >= made.said - 1, "of its last silence a frame may be cut"


@pytest.mark.parametrize("kind", ["silence", "cycle"])
def test_speech_that_is_drawn_anew_is_whole_and_a_seed_gives_one_reply(kind: str) -> None:
    """Its samples are those of one decode of its codes, whatever the chunks were."""
    again: dict[str, Any] = {"runaway_speech": "redraw", "seed": 3}
    with running_away(kind, once=True) as (omni, talker):
        streams = [
            omni.stream_speech(WORDS, chunk_frames=sizes, **again) for sizes in ((1,), (4, 25))
        ]
        streams.append(omni.stream_speech(WORDS, seed=3))
        *redrawn, ended = results_of(streams)
        said, codes = len(talker.said[streams[-1].slot]), redrawn[0].codes
        vocoder = omni._pipeline._engines.vocoder
        assert vocoder is not None
        first, *later = torch.from_numpy(codes).split(25)
        whole = vocoder.start([0], [first]) + [vocoder.step([0], [c])[0] for c in later]
    for result in redrawn:
        assert (result.talker_finish_reason, result.redrawn) == ("stop", True)
        assert result.codes.tolist() == codes.tolist()
        np.testing.assert_allclose(result.audio, np.concatenate(whole), atol=1e-5)
    assert ended.talker_finish_reason == "runaway" and not ended.redrawn
    assert codes[: said - 1].tolist() == ended.codes[: said - 1].tolist(), "what was said stays"


def test_speech_that_runs_away_twice_ends(silent: Qwen3Omni) -> None:
    result = silent.say(WORDS, seed=3, runaway_speech="redraw")
    assert (result.talker_finish_reason, result.redrawn) == ("runaway", True)


def test_a_session_keeps_the_whole_text_and_goes_on(silent: Qwen3Omni) -> None:
    with silent.session(seed=0) as session:
        for words in ("say three five", "say red"):
            session.append(words)
            result = list(session.respond())[-1].result  # type: ignore[union-attr]
            assert result.talker_finish_reason == "runaway"
            reply = session.turns[-1]
            assert reply.text == result.text == words.removeprefix("say ")  # type: ignore[union-attr]
            assert not reply.spoken_bytes, "silence is no pace"  # type: ignore[union-attr]
        assert session._pace == SpokenPace()


def test_a_piece_that_runs_away_does_not_stop_the_next_one(silent: Qwen3Omni) -> None:
    words = "one two three four five six seven eight nine"
    result = silent.say(words, seed=0)
    assert (result.text, result.talker_finish_reason) == (words, "runaway")
    assert len(result.audio) == 1920 * len(result.codes) - 555
    cut = silent.say(words, seed=0, talker_max_new_tokens=20)
    assert cut.talker_finish_reason == "length"


def test_clients_get_an_end_that_they_know(silent: Qwen3Omni) -> None:
    """Text and speech are complete: the metric and the log say what the speech was."""
    asked: Any = {"role": "user", "content": f"say {WORDS}"}
    with serving(silent) as server, client_of(server) as client:
        answer = client.chat.completions.create(
            model="qwen3-omni",
            messages=[asked],
            modalities=["text", "audio"],
            audio={"voice": "ethan", "format": "pcm16"},
            extra_body={"seed": 0, "runaway_speech": "redraw"},
        )
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.audio is not None
        assert answer.choices[0].message.audio.transcript == WORDS
        with calling(server) as caller:
            caller.update(seed=0)
            caller.write(f"say {WORDS}")
            events = caller.answer()
        assert events[-1].response.status == "completed"
        assert np.frombuffer(sound_of(events), np.int16).any()
        count = server.service.metrics.registry.get_sample_value
        assert count("qwen3_omni_runaway_replies_total") == 2
        assert count("qwen3_omni_redrawn_replies_total") == 1
