"""Transcription over /v1/realtime: while speech arrives, without an answer or beside one."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qwen3_omni_neuron.events import TextDelta
from qwen3_omni_neuron.events.encoding import pcm16
from qwen3_omni_neuron.prompt.media.windows import GrowingWindows, Window
from qwen3_omni_neuron.serving.realtime import transcribing
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.transcription import Segment, stream_transcript, stream_window
from testing.http_server import serving, wait_until
from testing.realtime import PCM_16K, PUSH_TO_TALK, SHORT, Caller, calling, kinds, question

RATE = 16000
KIND = "conversation.item.input_audio_transcription"
TRANSCRIBING: dict[str, Any] = {"type": "transcription", "audio": PUSH_TO_TALK}
BESIDE = {"input": {**PUSH_TO_TALK["input"], "transcription": {}}}


@pytest.fixture(scope="module")
def server(speaking) -> Iterator[Server]:
    with serving(speaking) as running:
        yield running


@pytest.fixture
def transcribed(monkeypatch) -> "Heard":
    return Heard(monkeypatch)


class Heard:
    """Lengths of the windows whose transcription has begun, all of them so far.

    may_go_on: set unless a test holds the transcriptions back at their beginning.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.lengths, self._changed = list[int](), threading.Condition()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        monkeypatch.setattr(transcribing, "stream_window", self._stream)

    def _stream(self, omni: Any, window: Window, *given: Any, **options: Any) -> Any:
        with self._changed:
            self.lengths.append(len(window.samples))
            self._changed.notify_all()
        assert self.may_go_on.wait(20)
        return stream_window(omni, window, *given, **options)

    def wait_for(self, count: int) -> None:
        """Wait until so many windows were begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lengths) >= count, 20)


@pytest.fixture(scope="module")
def speech() -> NDArray[np.float32]:
    """Three windows: a question over and over, as it is once sent in 16 bits."""
    samples = np.tile(np.concatenate((question(), np.zeros(RATE // 2, np.float32))), 8)[: 20 * RATE]
    return np.frombuffer(pcm16(samples), "<i2") / np.float32(32768)


@pytest.fixture(scope="module")
def texts(speaking, speech) -> list[str]:
    """Transcripts of the windows, each by itself."""
    audio = {"audio": speech, "sampling_rate": RATE}
    events = stream_transcript(speaking, audio, timed=True)
    found = [event.text for event in events if isinstance(event, Segment)]
    assert len(found) == 3
    assert all(found)
    return found


def deltas_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == f"{KIND}.delta")


def ended(caller: Caller) -> list[Any]:
    """Receive events to the end of a transcript, which is no failure."""
    found = [caller.next()]
    while not found[-1].type.endswith((".completed", ".failed")):
        found.append(caller.next())
    assert found[-1].type == f"{KIND}.completed", found[-1]
    return found


def test_speech_is_transcribed_while_it_arrives(server, transcribed, speech, texts) -> None:
    """The client has the text of all windows but the last one before it commits."""
    counted = server.service.metrics.registry.get_sample_value
    already = counted("qwen3_omni_ttft_seconds_count") or 0
    with calling(server, extra_query={"intent": "transcription"}) as caller:
        assert caller.heard[0].session.type == "transcription"
        caller.update(**TRANSCRIBING)
        caller.say(speech)
        early, before = "", " ".join(texts[:-1])
        while len(early) < len(before):
            event = caller.next()
            assert event.type == f"{KIND}.delta"
            early += event.delta
        assert early == before
        assert len(transcribed.lengths) == len(texts) - 1
        caller.send("input_audio_buffer.commit")
        events = ended(caller)
    assert [kind for kind in kinds(events) if kind != f"{KIND}.delta"] == [
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        f"{KIND}.completed",
    ]
    assert events[-1].transcript == " ".join(texts) == early + deltas_of(events)
    assert {e.item_id for e in caller.heard if e.type.startswith(KIND)} == {events[0].item_id}
    assert events[-1].usage.seconds == pytest.approx(len(speech) / RATE)
    windows = GrowingWindows()
    known = windows.push(speech) + windows.finish()
    assert transcribed.lengths == [len(window.samples) for window in known]
    assert counted("qwen3_omni_ttft_seconds_count") == already + len(texts)


def test_in_a_session_that_answers_the_transcript_follows_its_item(
    server, transcribed, speech, texts
) -> None:
    """The windows do not: they are transcribed while the user speaks."""
    with calling(server) as caller:
        caller.update(audio=BESIDE, **SHORT)
        caller.say(speech)
        transcribed.wait_for(len(texts) - 1)
        caller.send("input_audio_buffer.commit")
        events = ended(caller)
    assert kinds(events)[:4] == [
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        f"{KIND}.delta",
    ]
    assert events[-1].transcript == deltas_of(events) == " ".join(texts)


def test_sound_that_is_only_transcribed_is_not_kept(speaking, server, speech) -> None:
    """Neither as sound nor as rows of a prompt, so that a session may last."""
    wait_until(lambda: not speaking.status().running)  # the session before has ended
    calls = speaking.status().stages["thinker"].calls
    with calling(server) as caller:
        session = caller.update(**TRANSCRIBING)
        assert session.to_dict().keys() == {
            "type",
            "audio",
            "include",
            "id",
            "object",
            "expires_at",
        }
        assert session.object == "realtime.transcription_session"
        held = server.service.held.taken
        caller.say(speech[: 2 * RATE])
        wait_until(lambda: server.service.held.taken > held + 2 * RATE * 4)
        assert speaking.status().stages["thinker"].calls == calls
        caller.send("input_audio_buffer.commit")
        done = ended(caller)[-1]
        wait_until(lambda: server.service.held.taken < held + 4096)
        caller.send("conversation.item.retrieve", item_id=done.item_id)
        part = caller.until("conversation.item.retrieved")[-1].item.content[0]
        assert (part.transcript, part.audio) == (done.transcript, None)


def test_sound_that_is_cleared_is_in_no_transcript(server, transcribed, speech, texts) -> None:
    with calling(server) as caller:
        caller.update(**TRANSCRIBING)
        held = server.service.held.taken
        transcribed.may_go_on.clear()
        caller.say(speech[: 10 * RATE])
        transcribed.wait_for(1)
        caller.send("input_audio_buffer.clear")
        caller.until("input_audio_buffer.cleared")
        transcribed.may_go_on.set()
        wait_until(lambda: server.service.held.taken < held + 4096)
        caller.say(speech[: 10 * RATE])
        caller.send("input_audio_buffer.commit")
        done = ended(caller)[-1]
    assert done.transcript.startswith(texts[0])
    assert deltas_of(caller.heard) == done.transcript


def test_silence_is_not_transcribed_and_no_more_held(server, transcribed, speech, texts) -> None:
    with calling(server) as caller:
        caller.update(**TRANSCRIBING)
        held = server.service.held.taken
        caller.say(np.zeros(20 * RATE, np.float32))
        wait_until(lambda: server.service.held.taken < held + 9 * RATE * 4 * 3 + 4096)
        caller.say(speech)
        caller.say(np.zeros(20 * RATE, np.float32))
        caller.send("input_audio_buffer.commit")
        done = ended(caller)[-1]
        wait_until(lambda: server.service.held.taken < held + 4096)
        caller.say(np.zeros(RATE, np.float32))
        caller.send("input_audio_buffer.commit")
        assert ended(caller)[-1].transcript == ""
        wait_until(lambda: server.service.held.taken < held + 8192)
    assert done.transcript
    assert sum(transcribed.lengths) < len(speech) + RATE
    assert done.usage.seconds == pytest.approx(40 + len(speech) / RATE)


def test_log_probabilities_where_they_are_asked_for(speaking, server, speech) -> None:
    clip = speech[: len(question())]
    audio = {"audio": clip, "sampling_rate": RATE}
    stream = stream_transcript(speaking, audio, logprobs=True)
    deltas = [event for event in stream if isinstance(event, TextDelta) and event.text]
    with calling(server) as caller:
        caller.update(**TRANSCRIBING, include=["item.input_audio_transcription.logprobs"])
        caller.say(clip)
        caller.send("input_audio_buffer.commit")
        events = ended(caller)
        given = events[-1].logprobs
        assert [x.token for x in given] == [delta.text for delta in deltas]
        for entry, delta in zip(given, deltas, strict=True):
            assert entry.logprob == pytest.approx(sum(delta.logprobs), abs=1e-4)
            assert bytes(entry.bytes).decode() == entry.token
        assert given == [x for e in events if e.type == f"{KIND}.delta" for x in e.logprobs]
        caller.update(**TRANSCRIBING, include=None)
        caller.say(clip)
        caller.send("input_audio_buffer.commit")
        assert {e.logprobs for e in ended(caller) if e.type.startswith(KIND)} == {None}


def test_the_server_cuts_speech_where_it_pauses_and_answers_nothing(server) -> None:
    silence = np.zeros(RATE, np.float32)
    with calling(server) as caller:
        caller.update(type="transcription", audio={"input": {"format": PCM_16K}})
        caller.say(np.concatenate((question(), silence, question(), silence)))
        ends = [ended(caller)[-1], ended(caller)[-1]]
    assert len({end.item_id for end in ends}) == 2
    assert all(end.transcript for end in ends)
    assert not any(kind.startswith("response.") for kind in kinds(caller.heard))


def test_a_session_that_only_transcribes_refuses_what_concerns_answers(server) -> None:
    with calling(server) as caller:
        caller.update(**TRANSCRIBING)
        caller.send("response.create")
        error = caller.until("error")[-1].error
        assert error.message.startswith("a session of type transcription has no responses")
        caller.send("input_audio_buffer.commit")
        assert caller.until("error")[-1].error.code == "input_audio_buffer_commit_empty"
        caller.say(question()[:300])  # 19 ms
        caller.send("input_audio_buffer.commit")
        error = caller.until("error")[-1].error
        assert (error.code, "the minimum is 0.03 s" in error.message) == (
            "input_audio_buffer_commit_empty",
            True,
        )
        caller.send("session.update", session={"type": "realtime"})
        error = caller.until("error")[-1].error
        assert (error.param, "can't change once" in error.message) == ("session.type", True)
        caller.send("input_audio_buffer.clear")
        caller.until("input_audio_buffer.cleared")
        assert caller.update().type == "realtime"


def test_a_transcript_that_fails_says_so_once_its_item_is_there(
    server, speech, monkeypatch
) -> None:
    failed = threading.Event()

    def fail(*_: Any, **__: Any) -> Any:
        failed.set()
        raise RuntimeError

    with calling(server) as caller:
        caller.update(**TRANSCRIBING)
        with monkeypatch.context() as patch:
            patch.setattr(transcribing, "stream_window", fail)
            caller.say(speech[: 10 * RATE])
            assert failed.wait(20)
        caller.send("input_audio_buffer.commit")
        events = caller.until(f"{KIND}.failed")
        assert kinds(events)[0] == "input_audio_buffer.committed"
        assert events[-1].item_id == events[0].item_id
        caller.say(question())
        caller.send("input_audio_buffer.commit")
        assert ended(caller)[-1].transcript
