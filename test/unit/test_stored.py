"""Stored conversations: the file format, and sessions that were saved, damaged or forged."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.files import conversation_fingerprint
from qwen3_omni_neuron.errors import MessageError, OutputError, StoredSessionError
from qwen3_omni_neuron.prompt.stored import pack, unpack
from qwen3_omni_neuron.prompt.turns import Reply
from qwen3_omni_neuron.session import Session
from testing.media_cases import IMAGE, audio, text, tone, video
from testing.replies import GREEDY, last
from testing.sessions import assert_same_prompt, prompt_of

SHORT = {**GREEDY, "thinker_max_new_tokens": 4, "talker_max_new_tokens": 5}
KEY = "0" * 64


def plain(value: Any) -> Any:
    """Return a document with lists in place of its arrays, and tuples."""
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.name, value.shape, value.tolist()]}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def document() -> dict[str, Any]:
    return {
        "words": "größer\n✓",
        "numbers": [0, -1.5, 1e300, True, None],
        "samples": np.arange(5, dtype=np.float32)[::2],
        "nested": ({"pixels": np.arange(12, dtype=np.uint8).reshape(2, 2, 3)}, []),
        "none": np.zeros((0, 4), np.int64),
        "one": np.array(7, np.int64),
    }


def test_a_document_comes_back() -> None:
    data = pack("session", KEY, document())
    assert plain(unpack(data, "session", KEY, "it")) == plain(document())


def test_no_byte_can_change_or_miss() -> None:
    data = pack("session", KEY, document())
    for at in range(len(data)):
        for wrong in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            with pytest.raises(StoredSessionError):
                unpack(wrong, "session", KEY, "it")
    with pytest.raises(StoredSessionError, match=r"is damaged: its .* checksum"):
        unpack(data + b"\0", "session", KEY, "it")


def test_another_kind_checkpoint_format_or_file_is_refused_by_its_name() -> None:
    data = pack("session", KEY, document())
    for given, match in (
        ((data, "realtime", KEY), "it is a stored session, not a stored realtime"),
        ((data, "session", "1" * 64), "another checkpoint .fingerprint 0{12}.*, this one has 1"),
        (
            (data.replace(b"format 1", b"format 2", 1), "session", KEY),
            "stored in format 2, but this version reads format 1",
        ),
        ((b"RIFF", "session", KEY), "it is not a stored conversation.*`Session.save`"),
    ):
        with pytest.raises(StoredSessionError, match=match):
            unpack(*given, "it")


@pytest.mark.parametrize("value", [float("nan"), "\ud800", {"a set"}], ids=repr)
def test_a_value_that_json_lacks_is_not_stored(value) -> None:
    with pytest.raises(StoredSessionError, match="has a value that can't be stored"):
        pack("session", KEY, {"options": [value]})


def test_what_is_no_file_is_refused(omni, tmp_path) -> None:
    for name, match in ((".", "is not a regular file"), ("nowhere", "does not exist")):
        with pytest.raises(StoredSessionError, match=match):
            omni.restore_session(tmp_path / name)


@pytest.fixture(scope="module")
def template_with_tools(omni) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omni.prompt_builder._template, "takes_tools", True)
        yield


@pytest.fixture(scope="module")
def session(omni, template_with_tools) -> Session:
    """A session with all that a session can have."""
    tools = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
    session = omni.session(
        "Be brief.", **SHORT, seed=7, tools=tools, use_audio_in_video=True, truncation="auto"
    )
    session.append([IMAGE, audio(0.4), text("Look.")])
    last(session.respond())
    session.append_audio(tone(0.5), 22050)
    session.append([video(5, 1.3, 0.4)])
    last(session.respond(speak=False, keep=False))
    session.insert(session.read({"role": "user", "content": ""}))
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    for turn in (session.read(message), session.read({"role": "tool", "content": "12 °C"})):
        turn.id, turn.size = f"item_{turn.role}", 7
        turn.shown = {"status": "completed", "image": np.arange(9, dtype=np.uint8)}
        session.insert(turn)
    last(session.respond())
    session.heard(0.1)
    replies = [turn for turn in session.turns if isinstance(turn, Reply)]
    replies[0].sent_s, replies[0].speed = 0.3, 1.5
    replies[0].rewrite("In other words.")
    session.append("And?")
    session._pace.slowest = 3.25
    return session


def restored(omni: Qwen3Omni, document: Any) -> Session:
    other = omni.session()
    other.restore(document)
    return other


def test_a_restored_session_has_all_of_it(omni, session) -> None:
    data = pack("session", omni.checkpoint_fingerprint, session.document())
    other = restored(omni, unpack(data, "session", omni.checkpoint_fingerprint, "it"))
    assert_same_prompt(prompt_of(other), prompt_of(session))
    assert [turn.id for turn in other.turns] == [turn.id for turn in session.turns]
    assert other._pace == session._pace
    assert plain(other.document()) == plain(session.document())
    # Its messages, with samples and pixels in them, make the same prompt anew.
    options = {"use_audio_in_video": True, "tools": session._options.shown_tools}
    assert_same_prompt(omni.prompt_builder.prompt(other.messages, **options), prompt_of(session))


def test_what_was_heard_changes_a_restored_session_as_the_stored_one(omni) -> None:
    with omni.session(**SHORT) as session:
        session.append("Hello")
        last(session.respond())
        other = restored(omni, session.document())
        for one in (session, other):
            one.heard(0.05)
        assert plain(other.document()) == plain(session.document())
        session.append("More")
        last(session.respond(keep=False))
        other = restored(omni, session.document())
        with pytest.raises(MessageError, match="no spoken reply"):
            other.heard(0)


def test_a_session_of_an_earlier_version_is_read(omni) -> None:
    with omni.session(**SHORT) as session:
        session.append("Hello")
        last(session.respond())
        made = session.document()
        for entry in made["turns"]:
            for turn in entry.values():
                for name in ("shown", "size", "rewritten", "sent_s", "speed", "ended"):
                    turn.pop(name, None)
        assert plain(restored(omni, made).document()) == plain(session.document())


def test_when_a_session_can_not_be_saved_or_restored(omni, tmp_path, slow_steps) -> None:
    file = tmp_path / "session"
    with omni.session(**GREEDY) as session:
        session.append_audio(tone(0.3), 16000)
        with pytest.raises(MessageError, match="a clip of append_audio has not ended"):
            session.save(file)
        stream = session.respond()
        with pytest.raises(MessageError, match="the last reply still streams"):
            session.save(file)
        stream.close()
        assert not file.exists()
        session.save(file)
        with pytest.raises(MessageError, match="already has turns"):
            session.restore(session.document())
    earlier = file.read_bytes()
    session.save(file)  # closed, and as it was
    assert file.read_bytes() == earlier


def test_a_file_that_can_not_be_written_leaves_the_earlier_one(omni, tmp_path, monkeypatch) -> None:
    file = tmp_path / "session"
    with omni.session() as session:
        session.save(file)
        earlier = file.read_bytes()
        session.append("More")
        for path, match in (
            (tmp_path, "can't be written .*Is a directory"),
            (Path(), "can't be written .*empty name"),
            (tmp_path / ("x" * 300), "can't be written .*File name too long"),
            (tmp_path / "nowhere" / "session", "can't be written .*No such file"),
            (tmp_path / "\0", "can't be written .*null"),
            (file / "session", "can't be written .*Not a directory"),
        ):
            with pytest.raises(OutputError, match=match):
                session.save(path)

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match=r"No space left on device.*not saved. Free space"):
            session.save(file)
    assert file.read_bytes() == earlier
    assert list(tmp_path.iterdir()) == [file]


def test_a_session_is_saved_once_at_a_time(omni, tmp_path, monkeypatch) -> None:
    """Two writers would share the file's temporary name."""
    file, flush = tmp_path / "session", os.fsync
    with omni.session() as session:
        other = threading.Thread(target=session.save, args=(file,))

        def flush_beside_another(descriptor: int) -> None:
            if other.ident is None:
                other.start()
                other.join(timeout=0.1)  # the other one waits
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", flush_beside_another)
        session.save(file)
        other.join()
    assert list(tmp_path.iterdir()) == [file]
    omni.restore_session(file)


def test_a_checkpoint_is_told_by_all_that_a_conversation_depends_on(checkpoint) -> None:
    found = {conversation_fingerprint(checkpoint)}
    for name in ("chat_template.json", "tokenizer_config.json", "preprocessor_config.json"):
        file = checkpoint / name
        content = file.read_bytes()
        file.write_bytes(content + b"\n")
        found.add(conversation_fingerprint(checkpoint))
        file.write_bytes(content)
    assert len(found) == 4
    settings = checkpoint / "generation_config.json"
    content = settings.read_bytes()
    settings.write_bytes(content + b"\n")
    try:
        assert conversation_fingerprint(checkpoint) in found
    finally:
        settings.write_bytes(content)
