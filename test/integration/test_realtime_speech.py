"""/v1/realtime, by OpenAI's own client over a socket: speech, its formats, and turns in it."""

import base64
import io
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.serving.realtime import input_buffer, session_config, turn_detector
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.session import Session
from testing import recorded_session
from testing.http_server import same_sound, serving, wait_until
from testing.imports import ROOT
from testing.realtime import (
    LONG,
    PCM_16K,
    PUSH_TO_TALK,
    SHORT,
    SPOKEN,
    calling,
    kinds,
    question,
    said,
    sound_of,
    text_of,
)
from train.speech import MEASURING, pink_noise, spoken_clip

pytestmark = pytest.mark.usefixtures("nothing_is_left")
RATE = 16000


@pytest.fixture(scope="module")
def speaker(speaking) -> Iterator[Server]:
    with serving(speaking) as running:
        yield running


def test_a_spoken_question_is_answered_as_the_api_does(speaking, speaker) -> None:
    samples = question()
    with calling(speaker) as caller:
        assert caller.update(audio=PUSH_TO_TALK, seed=5).audio.input.turn_detection is None
        caller.say(samples)
        caller.send("input_audio_buffer.commit")
        committed = caller.until("conversation.item.done")
        events = caller.answer()
    wanted = ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]
    assert kinds(committed) == wanted
    assert kinds(events) == SPOKEN
    options: Any = {"seed": 5, "literal_text": True}
    result = speaking.generate_audio([said(samples)], **options)
    assert text_of(events) == result.text == "eight"
    same_sound(sound_of(events), result.audio)
    deltas = [e.delta for e in events if e.type == "response.output_audio_transcript.delta"]
    assert "".join(deltas) == result.text
    response = events[-1].response
    assert response.status == "completed"
    assert response.usage.input_tokens == result.timings.prompt_tokens
    assert response.usage.output_tokens == result.timings.text_tokens + result.timings.frames
    assert response.usage.input_token_details.audio_tokens == result.timings.prompt_audio_tokens
    items = [e for e in events if e.type == "conversation.item.added"]
    assert items[0].previous_item_id == committed[0].item_id
    assert len({event.event_id for event in caller.heard}) == len(caller.heard)


def test_the_recorded_session_is_what_is_sent_today(speaker) -> None:
    text = (ROOT / recorded_session.DOCUMENT).read_text(encoding="utf-8")
    recorded = recorded_session.read(text)
    made = recorded_session.shown(recorded_session.record(speaker))
    assert [(side, event["type"]) for side, event in recorded] == [
        (side, event["type"]) for side, event in made
    ]
    for (_, event), (_, today) in zip(recorded, made, strict=True):
        assert recorded_session.form(event) == recorded_session.form(today)


@pytest.mark.parametrize("kind", ["audio/pcmu", "audio/pcma", "audio/pcm"])
def test_formats_of_telephony_and_24_khz(speaking, speaker, kind) -> None:
    rate = 24000 if kind == "audio/pcm" else 8000
    samples = soxr.resample(question(), RATE, rate)
    coded = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW", "audio/pcm": "PCM_16"}[kind]
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="RAW", subtype=coded)
    data = file.getvalue()
    form_of: Any = {"samplerate": rate, "channels": 1, "format": "RAW", "subtype": coded}
    given, _ = soundfile.read(io.BytesIO(data), dtype="float32", **form_of)
    item = {"type": "audio", "audio": given, "sampling_rate": rate}
    options: Any = {"seed": 5, "literal_text": True}
    result = speaking.generate_audio([{"role": "user", "content": [item]}], **options)
    with calling(speaker) as caller:
        form = {"format": {"type": kind}}
        caller.update(audio={"input": {**form, "turn_detection": None}, "output": form}, seed=5)
        for start in range(0, len(data), 1000):
            part = base64.b64encode(data[start : start + 1000]).decode()
            caller.send("input_audio_buffer.append", audio=part)
        caller.send("input_audio_buffer.commit")
        events = caller.until("conversation.item.done") and caller.answer()
    assert text_of(events) == result.text
    back, _ = soundfile.read(io.BytesIO(sound_of(events)), dtype="float32", **form_of)
    wanted = soxr.resample(result.audio, 24000, rate)
    assert abs(len(back) - len(wanted)) <= 1
    size = min(len(back), len(wanted))
    error = np.sqrt(np.mean((back[:size] - wanted[:size]) ** 2))
    assert error < 0.03 * np.sqrt(np.mean(wanted**2))


def test_turns_that_the_server_finds(speaking, speaker) -> None:
    dice = random.Random(4)
    noise = 0.002 * pink_noise(RATE, dice)
    with calling(speaker) as caller:
        caller.update(audio={"input": {"format": PCM_16K}}, seed=5, talker_max_new_tokens=60)
        for words in ("what is two plus four", "say red"):
            turn = len(caller.heard)
            caller.say(np.concatenate((noise, spoken_clip(words, MEASURING, dice), noise)))
            events = caller.until("response.done")
            found = [e for e in events if e.type != "conversation.item.truncated"]
            assert kinds(found)[:3] == [
                "input_audio_buffer.speech_started",
                "input_audio_buffer.speech_stopped",
                "input_audio_buffer.committed",
            ]
            assert kinds(found)[5:] == SPOKEN
            started, stopped, committed = found[:3]
            assert started.item_id == stopped.item_id == committed.item_id
            assert started.audio_start_ms < stopped.audio_end_ms
            assert turn < len(caller.heard)
            caller.send("conversation.item.retrieve", item_id=committed.item_id)
            item = caller.until("conversation.item.retrieved")[-1].item
            heard = base64.b64decode(item.content[0].audio)
            # Of the silence that ended the turn 200 of 500 ms are in it.
            ms = len(heard) // 32
            assert stopped.audio_end_ms - started.audio_start_ms - ms in range(290, 333)
    asked = [said(np.frombuffer(heard, "<i2") / np.float32(32767))]
    assert text_of(events) in ("red", "six", speaking.generate_text(asked, seed=5).text)


@pytest.fixture
def by_meaning(monkeypatch) -> None:
    """Lets semantic_vad judge turns, by what a test puts in place of `is_complete`."""
    monkeypatch.setattr(turn_detector, "can_judge", lambda: True)
    monkeypatch.setattr(input_buffer, "load_judge", lambda: None)
    monkeypatch.setattr(Qwen3Omni, "turns_by_silence", False)


@pytest.mark.usefixtures("by_meaning")
def test_a_complete_turn_is_answered_at_its_pause_from_a_prompt_computed_meanwhile(
    omni, server, monkeypatch
) -> None:
    """The judge waits until the whole prompt is computed: so nothing of it waits for the judge."""
    computed, was_computed = threading.Event(), list[bool]()
    prepare = Session.prepare

    def prepare_all(session: Session, speak: bool = True) -> None:
        prepare(session, speak)
        wait_until(lambda: not omni.status().running)
        computed.set()

    def is_complete(heard: NDArray[np.float32]) -> bool:
        was_computed.append(computed.wait(5))
        return True

    monkeypatch.setattr(Session, "prepare", prepare_all)
    monkeypatch.setattr(turn_detector, "is_complete", is_complete)
    with calling(server) as caller:
        detection = {"type": "semantic_vad", "eagerness": "low"}
        sound = {"input": {"format": PCM_16K, "turn_detection": detection}}
        assert caller.update(audio=sound, **SHORT).audio.input.turn_detection.eagerness == "low"
        samples = np.concatenate((question(), np.zeros(RATE, np.float32)))
        caller.say(samples, piece=len(samples))
        events = caller.until("response.done")
    assert was_computed == [True]
    stopped = next(e for e in events if e.type == "input_audio_buffer.speech_stopped")
    assert stopped.audio_end_ms < 1000 * len(question()) / RATE + 300
    usage = events[-1].response.usage
    assert usage.input_token_details.cached_tokens == usage.input_tokens - 1


@pytest.mark.usefixtures("slow_steps")
def test_speech_interrupts_an_answer(server) -> None:
    with calling(server) as caller:
        caller.update(audio={"input": {"format": PCM_16K}}, **{**SHORT, **LONG})
        caller.write("Hello")
        caller.send("response.create")
        sent = caller.until("response.output_audio.delta")
        for _ in range(3):
            sent += caller.until("response.output_audio.delta")
        caller.say(np.concatenate((0.001 * pink_noise(RATE // 2, random.Random(1)), question())))
        events = caller.until("conversation.item.truncated")
        started = next(i for i, e in enumerate(events) if "speech_started" in e.type)
        # Nothing of it is sent any more.
        assert "response.output_audio.delta" not in kinds(events[started:])
        done = next(e for e in events if e.type == "response.done")
        assert done.response.status == "cancelled"
        assert done.response.status_details.reason == "turn_detected"
        assert done.response.output[0].status == "incomplete"
        item = done.response.output[0]
        seconds = len(sound_of([*sent, *events])) / 48000
        cut = events[-1]
        assert cut.item_id == item.id
        assert 0 <= cut.audio_end_ms < 1000 * seconds
        caller.send("conversation.item.retrieve", item_id=item.id)
        left = caller.until("conversation.item.retrieved")[-1].item.content[0].transcript
        assert item.content[0].transcript.startswith(left)
        assert len(left) < len(item.content[0].transcript)


def test_a_turn_goes_on_while_its_detection_is_set_anew(server) -> None:
    detection = {"type": "server_vad", "create_response": False}
    silence = np.zeros(RATE, np.float32)
    with calling(server) as caller:
        caller.update(audio={"input": {"format": PCM_16K, "turn_detection": detection}})
        caller.say(question()[:RATE])
        shorter = {**detection, "silence_duration_ms": 200}
        caller.update(audio={"input": {"turn_detection": shorter}})
        kind = "input_audio_buffer.speech_started"
        started = next(event for event in caller.heard if event.type == kind)
        caller.say(silence)
        stopped = caller.until("input_audio_buffer.speech_stopped")[-1]
        assert stopped.item_id == started.item_id
        assert stopped.audio_end_ms in range(1000, 1500)
        caller.until("conversation.item.done")
        caller.update(audio={"input": {"turn_detection": None}})
        caller.say(silence)
        caller.update(audio={"input": {"turn_detection": detection}})
        caller.say(np.concatenate((silence, question())))
        assert caller.until(kind)[-1].audio_start_ms in range(3400, 4100)


def test_speech_that_may_not_interrupt_does_not(server) -> None:
    with calling(server) as caller:
        detection = {"type": "server_vad", "interrupt_response": False, "create_response": False}
        sound = {"input": {"format": PCM_16K, "turn_detection": detection}}
        options = {**SHORT, "thinker_max_new_tokens": 60, "talker_max_new_tokens": 90}
        caller.update(audio=sound, **{**options, "thinker_eos_token_id": 10**6})
        caller.write("Hello")
        caller.send("response.create")
        caller.until("response.output_audio.delta")
        caller.say(np.concatenate((question(), 0.001 * pink_noise(RATE, random.Random(1)))))
        events = caller.until("response.done")
        if "input_audio_buffer.committed" not in kinds(events):
            events += caller.until("input_audio_buffer.committed")
        assert "input_audio_buffer.speech_stopped" in kinds(events)
        done = next(e for e in events if e.type == "response.done")
        assert done.response.status == "incomplete"


def test_a_turn_that_is_too_large_ends_all_the_same(omni) -> None:
    detection = {"type": "server_vad", "create_response": False}
    silence = np.zeros(RATE, np.float32)
    with serving(omni, max_realtime_bytes=300_000) as server, calling(server) as caller:
        caller.update(audio={"input": {"format": PCM_16K, "turn_detection": detection}})
        caller.say(np.concatenate((question(), silence)), 10**6)
        told, empty, refused = caller.until("error"), caller.until("error"), 0
        found = kinds([*told, *empty])
        assert found[:2] == [f"input_audio_buffer.speech_{does}" for does in ("started", "stopped")]
        refused = caller.heard[-1].error
        assert refused.code == "session_too_large"
        caller.say(np.concatenate((question()[:RATE], silence)), 10**6)
        assert caller.until("conversation.item.done")[-1].item.role == "user"


def test_silence_after_a_reply_becomes_a_turn(server) -> None:
    with calling(server) as caller:
        detection = {"type": "server_vad", "idle_timeout_ms": 1000}
        sound = {"input": {"format": PCM_16K, "turn_detection": detection}}
        caller.update(audio=sound, **{**SHORT, "talker_max_new_tokens": 2})
        caller.say(np.zeros(3 * RATE, np.float32))  # nothing was answered yet
        caller.write("Hello")
        caller.answer()
        caller.say(np.zeros(2 * RATE, np.float32))
        events = caller.until("response.done")
        assert kinds(events)[:2] == [
            "input_audio_buffer.timeout_triggered",
            "input_audio_buffer.committed",
        ]
        assert events[0].audio_end_ms - events[0].audio_start_ms in range(990, 1040)
        assert events[0].audio_start_ms >= 2900
        assert "input_audio_buffer.speech_started" not in kinds(caller.heard)


def test_server_vad_without_its_packages(server, monkeypatch) -> None:
    monkeypatch.setattr(session_config, "can_detect", lambda: False)
    with calling(server) as caller:
        assert caller.heard[0].session.audio.input.turn_detection is None
        detection = {"type": "server_vad"}
        caller.send(
            "session.update",
            session={"type": "realtime", "audio": {"input": {"turn_detection": detection}}},
        )
        error = caller.until("error")[-1].error
        assert "pip install 'qwen3-omni-neuron[realtime]'" in error.message
        assert error.param == "session.audio.input.turn_detection"
