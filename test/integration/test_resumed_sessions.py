"""Sessions and replies of a session folder: a restart, another server, lost keys, a full disk."""

import base64
import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from test_realtime import TOOL, Paused
from websockets.exceptions import ConnectionClosed

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.serving.realtime import keeper
from qwen3_omni_neuron.serving.realtime.live_session import LiveSession
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.serving.settings import ServerSettings, longest_life_s
from testing.http_client import ask
from testing.http_server import client_of, serving, url_of, wait_until
from testing.media_cases import noise_image
from testing.raw_http import ASKED, HELLO
from testing.realtime import (
    LONG,
    PUSH_TO_TALK,
    SHORT,
    Caller,
    calling,
    question,
    sound_of,
    text_of,
)

KEYS = ("one", "two")
SPOKEN: Any = {**ASKED, "modalities": ["audio"], "audio": {"format": "wav"}}
SPOKEN["extra_body"] = {"talker_max_new_tokens": 3}
Keeping = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the key `one`, in which servers make the session folder `kept`."""
    made = tmp_path_factory.mktemp("sessions")
    key_of(made, "one")
    return made


@pytest.fixture(scope="module")
def keeping(omni: Qwen3Omni, folder: Path) -> Keeping:
    """Function that serves a model over the session folder."""
    keys = {"api_keys": KEYS, "session_keys": folder / "one"}
    return partial(serving, omni, session_folder=folder / "kept", **keys)


@pytest.fixture(scope="module")
def kept(keeping: Keeping) -> Iterator[Server]:
    """One server over the session folder."""
    with keeping() as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(folder: Path) -> Iterator[None]:
    """Every test begins with an empty folder."""
    yield
    for file in files_of(folder):
        file.unlink()


def key_of(folder: Path, name: str) -> Path:
    file = folder / name
    file.write_text(name.encode().ljust(32, b".").hex())
    return file


def files_of(folder: Path) -> list[Path]:
    """Return the files that are written whole, without notes of used tokens."""
    unlike = (".tmp", ".used")
    return sorted(file for file in (folder / "kept").glob("*") if file.suffix not in unlike)


def token_of(caller: Caller) -> str | None:
    """Return the token of the last session that the server has shown."""
    return next(e.session.resume_token for e in reversed(caller.heard) if hasattr(e, "session"))


def resume(caller: Caller, token: str | None) -> Any:
    caller.send("session.resume", resume_token=token)
    return caller.until("session.updated")[-1].session


def refusal(caller: Caller, token: str | None) -> str:
    """Return the code of the error that a token gets."""
    caller.send("session.resume", resume_token=token, event_id="mine")
    error = caller.until("error")[-1].error
    assert error.event_id == "mine"
    return error.code


def metric(server: Server, name: str, **labels: str) -> float:
    text = ask(f"{url_of(server)}/metrics", headers={"authorization": "Bearer one"}).body.decode()
    words = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    line = f"qwen3_omni_{name}" + (f"{{{words}}} " if words else " ")
    return sum(float(row[len(line) :]) for row in text.splitlines() if row.startswith(line))


def left(server: Server) -> None:
    """Wait until a server's sessions have ended, with what they had to write."""
    wait_until(lambda: not metric(server, "realtime_sessions"))


def begun(caller: Caller) -> None:
    """Say something in sound, pictures and text, with a reply that was heard in part."""
    tools = {"tools": [TOOL], "tool_choice": "none"}
    caller.update(audio=PUSH_TO_TALK, instructions="Be brief.", **tools, **SHORT)
    png = io.BytesIO()
    noise_image(64, 64).save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    part = {"type": "input_image", "image_url": url}
    image = {"type": "message", "role": "user", "id": "image_1", "content": [part]}
    caller.send("conversation.item.create", item=image)
    caller.say(question())
    caller.send("input_audio_buffer.commit")
    caller.until("input_audio_buffer.committed")
    item = caller.answer(thinker_max_new_tokens=12, talker_max_new_tokens=30)[-1].response.output[0]
    caller.send("conversation.item.truncate", item_id=item.id, content_index=0, audio_end_ms=1000)
    caller.until("conversation.item.truncated")


def went_on(caller: Caller) -> tuple[str, bytes, list[Any]]:
    """Return the next reply, and the items before it, with the media of the user."""
    caller.write("Go on.")
    events = caller.answer()
    items: list[Any] = []
    for item in dict.fromkeys(e.item.id for e in caller.heard if hasattr(e, "item")):
        caller.send("conversation.item.retrieve", item_id=item)
        found = caller.until("conversation.item.retrieved")[-1].item
        items.append(found.model_dump(exclude={"id"}))
    return text_of(events), sound_of(events), items


def test_a_session_goes_on_after_a_restart(keeping: Keeping, folder: Path) -> None:
    """Its next reply is that of a session that was never interrupted; so are its items."""
    with keeping() as server:
        with calling(server, "one") as caller:
            begun(caller)
            whole = went_on(caller)
        with calling(server, "one") as caller:
            begun(caller)
            token, session = token_of(caller), caller.heard[0].session
            known = list(caller.heard)
    assert token is not None and len(token) == 43
    for file in files_of(folder):
        assert token.encode() not in file.name.encode() + file.read_bytes()
    with keeping() as server, calling(server, "one") as caller:
        shown = resume(caller, token)
        assert (shown.id, shown.instructions) == (session.id, "Be brief.")
        assert shown.audio.input.turn_detection is None
        assert [tool.name for tool in shown.tools] == ["look_up"]
        assert shown.resume_token == caller.heard[0].session.resume_token != token
        caller.heard[:0] = known
        assert went_on(caller) == whole
        assert metric(server, "session_resumes_total", result="resumed") == 1
        assert refusal(caller, token) == "session_in_use"
        with calling(server, "one") as other:  # the earlier token is of no use any more
            wait_until(lambda: refusal(other, token) == "session_not_found")


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("lost", [False, True], ids=["left", "lost"])
def test_a_client_that_is_lost_during_a_reply_resumes_its_session(kept: Server, lost: bool) -> None:
    """The reply stays as far as it was sent, also where the server does not know of the loss."""
    with calling(kept, "one") as again:
        with calling(kept, "one") as caller:
            caller.update(audio=PUSH_TO_TALK, **LONG)
            caller.write("Hello")
            caller.send("response.create")
            caller.until("response.output_audio.delta")
            item = caller.until("response.output_audio.delta")[-1].item_id
            token = token_of(caller)
            if lost:
                resume(again, token)
                assert caller.until("error")[-1].error.code == "session_resumed"
                with pytest.raises(ConnectionClosed):
                    caller.until("never")
        if not lost:
            resume(again, token)
        again.send("conversation.item.retrieve", item_id=item)
        reply = again.until("conversation.item.retrieved")[-1].item
        assert reply.status == "incomplete"
        assert reply.content[0].transcript
        cut: Any = {"item_id": item, "content_index": 0, "audio_end_ms": 100}
        again.send("conversation.item.truncate", **cut)
        again.until("conversation.item.truncated")
        again.write("Go on.")
        again.update(**SHORT, thinker_eos_token_id=None)
        assert again.answer()[-1].response.status != "failed"


def test_a_reply_with_calls_is_kept_as_its_client_has_it(
    kept: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is an item, and no part of the reply's text."""
    Paused(monkeypatch)
    with calling(kept, "one") as again:
        with calling(kept, "one") as caller:
            caller.update(tools=[TOOL], output_modalities=["text"])
            caller.write("What is above?")
            caller.send("response.create")
            caller.until("response.output_item.added")
            message = caller.heard[-1].item.id
            call = caller.until("response.function_call_arguments.done")[-1].item_id
        resume(again, token_of(caller))
        for item, content in ((message, "Let me look. "), (call, None)):
            again.send("conversation.item.retrieve", item_id=item)
            found = again.until("conversation.item.retrieved")[-1].item
            assert (found.type == "message") == (content is not None)
            assert content is None or found.content[0].text == content


def test_a_session_that_can_not_be_resumed_says_why(
    kept: Server, keeping: Keeping, folder: Path, omni: Qwen3Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that its client has begun instead goes on."""
    with calling(kept, "one") as caller:
        caller.update(**SHORT)
        caller.write("Hello")
    left(kept)
    (file,) = files_of(folder)
    token, whole = token_of(caller), file.read_bytes()
    with calling(kept, "two") as caller:
        assert refusal(caller, token) == refusal(caller, "guessed") == "session_not_found"
        assert refusal(caller, token_of(caller)) == "session_not_found"  # its own
    with calling(kept, "one") as caller:
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert refusal(caller, token) == "stored_damaged"
        file.write_bytes(whole)
        with monkeypatch.context() as patch:
            patch.setitem(omni.__dict__, "checkpoint_fingerprint", "another's")
            assert refusal(caller, token) == "stored_unusable"
        with monkeypatch.context() as patch:
            patch.setattr(keeper, "STORED_KIND", "realtime session of another form")
            assert refusal(caller, token) == "stored_unusable"
        os.utime(file, (1, 1))
        assert refusal(caller, token) == "session_not_found"
        caller.update(**SHORT)
        caller.write("Hello")
        assert caller.answer()[-1].response.output
    assert metric(kept, "session_resumes_total", result="stored_unusable") == 2
    os.utime(file)
    new = key_of(folder, "new")
    with keeping(session_keys=new) as server, calling(server, "one") as caller:
        assert refusal(caller, token) == "stored_key_lost"
    new.write_text(f"{new.read_text()}\n{(folder / 'one').read_text()}\n")
    with keeping(session_keys=new) as server, calling(server, "one") as caller:
        resume(caller, token)
        assert caller.answer()[-1].response.output


def test_a_full_disk_ends_no_session(
    kept: Server,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its client is told that it can't be resumed, and again when it can."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    not_kept = partial(metric, kept, "not_kept_total", reason="disk")
    with calling(kept, "one") as caller, client_of(kept, "one") as client:
        caller.update(**SHORT)
        token = token_of(caller)
        wait_until(lambda: len(files_of(folder)) == 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            caller.write("Hello")
            assert caller.until("session.updated")[-1].session.resume_token is None
            wait_until(lambda: not files_of(folder))
            assert not_kept(kind="session") == 1
            assert "not_kept" in caplog.messages
            assert caller.answer()[-1].response.output
            assert named(client, client.chat.completions.create(**SPOKEN))  # it stays in memory
            wait_until(lambda: not_kept(kind="reply") == 1)
            assert not files_of(folder)
        caller.write("And now?")
        assert caller.until("session.updated")[-1].session.resume_token == token
        assert len(files_of(folder)) == 1
    with calling(kept, "one") as caller:
        resume(caller, token)


def named(client: openai.OpenAI, reply: Any) -> bool:
    """Return whether a later turn can name a spoken reply."""
    audio = reply.choices[0].message.audio
    turns: Any = [*HELLO, {"role": "assistant", "audio": {"id": audio.id}}, *HELLO]
    try:
        client.chat.completions.create(**{**ASKED, "messages": turns})
    except openai.BadRequestError as error:
        assert error.code == "audio_not_found"
        return False
    return True


def test_a_session_that_only_transcribes_is_resumed_as_one(kept: Server) -> None:
    with calling(kept, "one", extra_query={"intent": "transcription"}) as caller:
        audio = {"input": {"turn_detection": None}}
        caller.send("session.update", session={"type": "transcription", "audio": audio})
        caller.until("session.updated")
    with calling(kept, "one") as again:
        shown = resume(again, token_of(caller))
        assert (shown.type, shown.object) == ("transcription", "realtime.transcription_session")
        assert shown.audio.input.turn_detection is None


def test_a_stored_configuration_that_drew_runaway_speech_anew_ends_it(
    kept: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = LiveSession._stored

    def earlier(session: LiveSession) -> Any:
        made = stored(session)
        return made | {"config": made["config"] | {"runaway_speech": "redraw"}}

    monkeypatch.setattr(LiveSession, "_stored", earlier)
    with calling(kept, "one") as caller:
        caller.write("Hello")
    left(kept)
    monkeypatch.undo()
    with calling(kept, "one") as again:
        assert resume(again, token_of(caller)).runaway_speech == "end"


def test_a_reply_that_was_stored_before_its_end_is_incomplete(
    kept: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream has ended, and its response is about to: the item can be deleted later."""
    stored = LiveSession._stored

    def earlier(session: LiveSession) -> Any:
        made = stored(session)
        reply = made["session"]["turns"][-1]["reply"]
        reply["shown"] = reply["shown"] | {"status": "in_progress"}
        return made

    monkeypatch.setattr(LiveSession, "_stored", earlier)
    with calling(kept, "one") as caller:
        caller.update(**SHORT)
        caller.write("Hello")
        item = caller.answer()[-1].response.output[0].id
    left(kept)
    monkeypatch.undo()
    with calling(kept, "one") as again:
        resume(again, token_of(caller))
        again.send("conversation.item.retrieve", item_id=item)
        assert again.until("conversation.item.retrieved")[-1].item.status == "incomplete"
        again.send("conversation.item.delete", item_id=item)
        again.until("conversation.item.deleted")


def test_two_servers_share_a_folder(keeping: Keeping) -> None:
    """Like replicas of a fleet: each finds and removes sessions and replies of the other."""
    with keeping() as first, keeping() as second:
        with calling(first, "one") as caller:
            begun(caller)
            token, known = token_of(caller), list(caller.heard)
            kept = caller.heard[0].session.id
        with calling(second, "one") as caller:
            left(first)
            assert resume(caller, token).id == kept
            caller.heard[:0] = known
            there = went_on(caller)
        with calling(first, "one") as caller:
            begun(caller)
            assert went_on(caller) == there
        with client_of(first, "one") as one, client_of(second, "one") as other:
            reply = one.chat.completions.create(**SPOKEN)
            wait_until(lambda: named(other, reply))
            assert named(one, reply)
            with client_of(second, "two") as stranger:
                assert not named(stranger, reply)
                with pytest.raises(openai.NotFoundError):
                    stranger.chat.completions.delete(reply.id)
            assert other.chat.completions.delete(reply.id).deleted
            assert not named(one, reply) and not named(other, reply)
            with pytest.raises(openai.NotFoundError, match="was deleted, or never was"):
                one.chat.completions.delete(reply.id)


@pytest.mark.parametrize("apart", [False, True], ids=["here", "at another server"])
def test_a_session_is_at_one_connection_alone(
    keeping: Keeping, kept: Server, folder: Path, apart: bool
) -> None:
    """The one that it is taken from is told so, and its server writes nothing more of it."""
    with ExitStack() as stack:
        other = stack.enter_context(keeping()) if apart else kept
        first = stack.enter_context(calling(kept, "one"))
        first.update(audio=PUSH_TO_TALK, **SHORT)
        first.write("Hello")
        wait_until(lambda: len(files_of(folder)) == 1)
        token = token_of(first)
        again = stack.enter_context(calling(other, "one"))
        resume(again, token)
        assert first.until("error")[-1].error.code == "session_resumed"
        with pytest.raises(ConnectionClosed) as closed:
            first.until("never")
        assert closed.value.rcvd is not None and closed.value.rcvd.reason == "session_resumed"
        again.write("Go on.")
        assert again.answer()[-1].response.output
        wait_until(lambda: len(files_of(folder)) == 1)
        third = stack.enter_context(calling(kept, "one"))
        assert refusal(third, token) == "session_not_found"


@pytest.mark.parametrize("how", ["resumed", "deleted"])
def test_a_file_that_is_put_back_is_refused_as_old(
    keeping: Keeping, kept: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also when the note that its token was used is no longer kept."""
    with calling(kept, "one") as caller:
        caller.update(**SHORT)
        caller.write("Hello")
        token = token_of(caller)
        wait_until(lambda: len(files_of(folder)) == 1)
        (file,) = files_of(folder)
        whole = file.read_bytes()
        if how == "deleted":
            caller.update(resume_token=None)
    left(kept)
    if how == "resumed":
        (file,) = files_of(folder)
        whole = file.read_bytes()
        with calling(kept, "one") as caller:
            resume(caller, token)
        left(kept)
    wait_until(lambda: not file.exists())
    file.write_bytes(whole)
    with keeping() as server, calling(server, "one") as caller:
        assert refusal(caller, token) == "session_not_found"
        for note in (folder / "kept").glob("*.used"):
            note.unlink()
        with monkeypatch.context() as patch:
            later_s = time.time() + longest_life_s(ServerSettings()) + 1
            clock = SimpleNamespace(time=lambda: later_s, monotonic=time.monotonic)
            patch.setattr(keeper, "time", clock)
            assert refusal(caller, token) == "session_not_found"
        resume(caller, token)  # whoever can write to the folder can remove the notes


def test_a_session_is_deleted_on_request(kept: Server, folder: Path) -> None:
    with calling(kept, "one") as caller:
        caller.update(**SHORT)
        caller.write("Hello")
        token = token_of(caller)
        wait_until(lambda: len(files_of(folder)) == 1)
        caller.send("session.update", session={"type": "realtime", "resume_token": "mine"})
        assert caller.until("error")[-1].error.param == "session.resume_token"
        assert caller.update(resume_token=token).resume_token == token  # as it got it
        assert caller.update(resume_token=None).resume_token is None
        assert not files_of(folder)
        assert caller.answer()[-1].response.output
    left(kept)
    assert not files_of(folder)
    with calling(kept, "one") as caller:
        assert refusal(caller, token) == "session_not_found"


def test_a_server_without_a_folder_keeps_nothing(server: Server) -> None:
    with calling(server) as caller:
        assert not hasattr(caller.heard[0].session, "resume_token")
        assert refusal(caller, "a token") == "unsupported"


def test_items_that_are_sent_again_are_computed_once(
    omni: Qwen3Omni, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that knows nothing of tokens sends all items again: one prefill has them all."""
    thinker, prefills = omni._pipeline._engines.thinker, list[Any]()
    prefill = type(thinker).prefill

    def counted(self: Any, *given: Any) -> Any:
        prefills.append(given)
        return prefill(self, *given)

    monkeypatch.setattr(type(thinker), "prefill", counted)
    with calling(server) as caller:
        caller.update(audio=PUSH_TO_TALK, instructions="Sent again, all of it.", **SHORT)
        for number in range(6):
            caller.write(f"Question {number}")
            caller.write(f"Answer {number}", role="assistant")
        caller.write("Go on.")
        assert not prefills
        caller.answer(output_modalities=["text"])
    assert len(prefills) == 1
