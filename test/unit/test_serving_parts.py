"""Parts of the server, each alone: reply text, kept replies, keys, rates, sounds, a player."""

import asyncio
import gc
import io
import itertools
import json
import logging
import re
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from qwen3_omni_neuron.engines.process import heap
from qwen3_omni_neuron.engines.process.heap import LOOK_S, IdleMemory
from qwen3_omni_neuron.errors import OptionError, ToolCallError
from qwen3_omni_neuron.events.encoding import pcm16, wav_header
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.serving.edge.gate import Gate
from qwen3_omni_neuron.serving.edge.keys import Keys, RequestRates, read_keys
from qwen3_omni_neuron.serving.edge.quotas import Quota
from qwen3_omni_neuron.serving.endpoints.sound import SoundEncoder, encode_sound
from qwen3_omni_neuron.serving.kept import (
    MOST_CHARACTERS,
    KeptResponse,
    KeptResponses,
    SpokenReplies,
)
from qwen3_omni_neuron.serving.logs import HumanFormatter, JsonFormatter, log_to_stderr
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.reply import Call, Content, Reasoning, ReplyText, new_id
from qwen3_omni_neuron.serving.service import Service, Turnstile
from qwen3_omni_neuron.serving.settings import ServerSettings
from testing.marked_text import strings_with_markers
from testing.subprocesses import run_python

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
REPLIES: list[tuple[str, bool, bool, tuple[str, str, list[str]]]] = [
    ("Hi.", False, False, ("", "Hi.", [])),
    ("\n Hi.", False, False, ("", "\n Hi.", [])),
    ("Hm.</think>\n\nHi.", True, False, ("Hm.", "Hi.", [])),
    ("Hm. No end", True, False, ("Hm. No end", "", [])),
    ("a </think> b", False, False, ("", "a </think> b", [])),
    (f"Hm.</think>{CALL}", True, True, ("Hm.", "", ["f"])),
    (f"One.\n{CALL}\n{CALL}\nTwo.", False, True, ("", "One.\nTwo.", ["f", "f"])),
    (f"One {CALL}", False, False, ("", f"One {CALL}", [])),
    ("a < b <tool", False, True, ("", "a < b <tool", [])),
]


@pytest.mark.parametrize(("text", "thinks", "tools", "wanted"), REPLIES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_reply_is_split_the_same_however_its_text_comes(
    text, thinks, tools, wanted, data
) -> None:
    split = ReplyText(thinks, tools)
    parts, at = [], 0
    while at < len(text):
        size = data.draw(st.integers(1, 8))
        parts += split.push(text[at : at + size])
        at += size
    parts += split.finish(at_limit=True)
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    calls = [part for part in parts if isinstance(part, Call)]
    assert (reasoning, content, [call.name for call in calls]) == wanted
    assert all(json.loads(call.arguments) == {"a": [1]} for call in calls)


@settings(max_examples=60, deadline=None)
@given(text=strings_with_markers, sizes=st.lists(st.integers(1, 40), min_size=1))
def test_the_end_of_a_call_is_outside_of_its_strings(text, sizes) -> None:
    arguments = {"a": [text], text: 1}
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    left, parts = f"<tool_call>\n{body}\n</tool_call>\nDone.", list[Any]()
    split = ReplyText(False, True)
    for size in itertools.cycle(sizes):
        parts, left = parts + split.push(left[:size]), left[size:]
        if not left:
            break
    call, *rest = parts + split.finish(at_limit=False)
    assert json.loads(call.arguments) == arguments
    assert "".join(part.text for part in rest) == "Done."


def test_a_call_that_is_malformed_is_never_content() -> None:
    for body in (
        *("{</tool_call>x", '{"name": 1, "arguments": {}}</tool_call>'),
        *('{"name": "\\ud800", "arguments": {}}</tool_call>', "[" * 9999 + "</tool_call>"),
        *('{"name": "f"}</tool_call>', "[]</tool_call>"),
        '{"name": "f", "arguments": false}</tool_call>',
        # Numbers that Python reads and JSON does not have.
        *('{"name": "f", "arguments": {"a": ' + n + "}}</tool_call>" for n in ("NaN", "1e999")),
    ):
        split = ReplyText(False, True)
        assert split.push("One. <tool_call>") == [Content("One. ")]
        with pytest.raises(ToolCallError):
            split.push(body)
            split.finish(at_limit=True)


def test_a_call_that_is_cut_off_has_what_was_written_of_its_arguments() -> None:
    """None of it is told where a stop string cuts it off: nobody has asked for half a call."""
    for body, arguments in (
        *[("", None), ('{"name": "f"', None), ('{"name": "f", "arguments": ', None)],
        *[('{"arguments": {"a": 1}', None), ('{"name": "\\ud800", "arguments": {', None)],
        *[
            ('\n{"name": "f", "arguments": {"a": "Kö', '{"a": "Kö'),
            ('{"name":"f","arguments":{', "{"),
        ],
        *[
            ('{"name": "f", "arguments": {}', "{}"),
            ('{"name": "f", "arguments": {"a": 1}}\n</', '{"a": 1}'),
        ],
        ('{"name": "f", "arguments": ' + '{"a":' * 9999, '{"a":' * 9999),
    ):
        for at_limit in (False, True):
            split = ReplyText(False, True)
            assert split.push(f"One. <tool_call>{body}") == [Content("One. ")]
            calls = split.finish(at_limit=at_limit)
            assert at_limit or not calls
        assert [(c.name, c.arguments, c.complete) for c in calls if isinstance(c, Call)] == (
            [] if arguments is None else [("f", arguments, False)]
        )


def test_ids_differ_from_whatever_thread_they_come() -> None:
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(new_id, ["req_"] * 1000))
    assert len(set(ids)) == 1000
    assert all(re.fullmatch("req_[0-9a-f]{24}", one) for one in ids)
    again = "from qwen3_omni_neuron.serving.openai.reply import new_id; print(new_id('req_'))"
    assert run_python("-c", again).strip() not in ids  # another process begins with another secret


def kept(text: str = "", previous: str | None = None, item: str = "") -> KeptResponse:
    """Return a response of about as many bytes as its text."""
    output = {item: b'"' + text.encode() + b'"'} if item else {}
    return KeptResponse(b"{}", previous, {"in": b'"in"'}, output, {})


def test_spoken_replies_are_kept_for_their_owner_and_bounded_in_number_and_size() -> None:
    replies = SpokenReplies(4, 60, 0.5)
    audio_id, expires_at = replies.named("chatcmpl-1")
    assert audio_id == "audio_1" and abs(expires_at - 60 - time.time()) < 5
    for name in "12345":
        replies.keep(name, "me" if name < "4" else name, "Hi")
    assert [replies.get("me", name) for name in "123"] == [None, "Hi", "Hi"]  # by its share
    assert replies.get("you", "2") is None and replies.get("5", "5") == "Hi"
    replies.keep("6", "me", "x" * (MOST_CHARACTERS // 2))
    assert replies.get("me", "3") is None and replies.delete("me", "6")
    assert replies.bytes_held == 4


def test_a_response_is_kept_for_its_owner_until_it_was_not_used_for_its_time() -> None:
    now = [0.0]
    held = Quota("bytes", 1 << 20, 1.0, "full")
    responses = KeptResponses(10, 60, 1 << 20, 1.0, held, lambda: now[0])
    responses.keep("me", "a", kept("A", item="msg_a"))
    now[0] = 30.0
    responses.keep("me", "b", kept("B", "a", "msg_b"))
    now[0] = 40.0
    turns = [kept("A", item="msg_a"), kept("B", "a", "msg_b")]
    assert responses.conversation("me", "b") == turns  # both are used
    assert responses.conversation("you", "b") is responses.get("you", "a") is None
    assert responses.item("me", "msg_a") == b'"A"' and responses.item("you", "msg_a") is None
    assert not responses.delete("you", "a")
    now[0] = 99.0
    assert responses.get("me", "a") is not None
    now[0] = 100.0
    assert responses.get("me", "a") is responses.item("me", "msg_a") is None
    assert responses.bytes_held == held.taken == 0


def test_a_conversation_of_responses_loses_its_end_first() -> None:
    held = Quota("bytes", 1 << 20, 1.0, "full")
    responses = KeptResponses(3, 60, 1 << 20, 1.0, held)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        responses.keep("me", name, kept(previous=previous))
    assert responses.conversation("me", "c") is not None
    responses.keep("me", "d", kept())
    assert responses.get("me", "c") is None
    assert responses.conversation("me", "b") is not None
    assert responses.delete("me", "a") and responses.conversation("me", "b") is None


def test_kept_responses_are_bounded_in_all_by_owner_and_by_the_servers_bytes() -> None:
    held = Quota("bytes", 1 << 20, 0.5, "full")
    size = kept("x" * 5000, item="1").size
    responses = KeptResponses(9, 60, 4 * size, 0.5, held)

    def keep(owner: str, *names: str) -> None:
        for name in names:
            responses.keep(owner, name, kept("x" * 5000, item=f"item {name}"))

    def names(owner: str) -> set[str]:
        return {name for name in "123456789" if responses.get(owner, name) is not None}

    keep("me", "1", "2", "3")
    assert names("me") == {"2", "3"} and responses.item("me", "item 1") is None  # by its share
    keep("you", "4", "5")
    keep("she", "6")
    assert names("me") == {"3"} and names("you") == {"4", "5"} and names("she") == {"6"}
    responses.keep(
        "she", "7", KeptResponse(b"x" * (2 * size), None, {}, {}, {})
    )  # beyond its share
    assert names("she") == {"6"} and names("you") == {"4", "5"}
    many = KeptResponses(4, 60, 1 << 20, 0.5, held)
    for name in "123":
        many.keep("me", name, kept())
    assert many.get("me", "1") is None and many.get("me", "3") is not None  # by number
    before = held.taken
    held.take("he", (1 << 19) - 3000)
    many.keep("he", "8", kept("x" * 3000, item="msg"))
    assert many.get("he", "8") is many.item("he", "msg") is None
    assert held.taken == before + (1 << 19) - 3000


def test_keys_are_read_and_asked_for(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n one \n\ntwo\n")
    keys = Keys(read_keys(file))
    first, second = (keys.owner(b"Bearer " + key, "::1") for key in (b"one", b"two"))
    assert first != second
    assert "one" not in first
    tails = (b"", b"Bearer", b"Bearer ", b"Bearer on", b"Basic one", b"one", b"Bearer \xff")
    for wrong in (None, *tails):
        with pytest.raises(ApiError) as refused:
            keys.owner(wrong, "::1")
        assert refused.value.status == 401
    assert Keys(()).owner(None, "::1") == "address ::1"
    file.write_text("# none\n")
    for path in (file, tmp_path / "missing"):
        with pytest.raises(OptionError):
            read_keys(path)


def test_a_caller_may_ask_so_often_a_minute_and_then_waits() -> None:
    now = [0.0]
    rates = RequestRates(2, lambda: now[0])
    rates.count("a")
    rates.count("a")
    with pytest.raises(ApiError) as refused:
        rates.count("a")
    assert (refused.value.status, refused.value.retry_after_s) == (429, 30)
    rates.count("b")
    now[0] = 30.0
    rates.count("a")
    with pytest.raises(ApiError):
        rates.count("a")


@pytest.mark.parametrize("count", [0, 1, 499, 500, 501, 1365, 8000, 8001, 50_000])
def test_samples_are_rounded_to_16_bits_however_many_they_are(count) -> None:
    samples = np.random.default_rng(count).uniform(-1, 1, count).astype(np.float32)
    samples[:3] = (-1, 1, 0.5 / 32767)[:count]
    expected = [round(float(sample * np.float32(32767))) for sample in samples]
    assert np.frombuffer(pcm16(samples), "<i2").tolist() == expected


def test_sounds_are_what_they_say() -> None:
    samples = np.sin(np.arange(24000, dtype=np.float32) / 9) * 0.5
    assert encode_sound(samples, "pcm16") == pcm16(samples)
    wav = encode_sound(samples, "wav")
    assert wav == wav_header(24000, 48000) + pcm16(samples)
    read, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    assert rate == 24000
    assert np.abs(read - samples).max() < 1e-4
    for sound_format, magic in (("flac", b"fLaC"), ("opus", b"OggS"), ("mp3", b"\xff")):
        data = encode_sound(samples, sound_format)
        assert data.startswith(magic)
        read, rate = soundfile.read(io.BytesIO(data))
        assert abs(len(read) / rate - 1) < 0.06
        loudest = np.abs(np.fft.rfft(read[:rate])).argmax()  # in Hz, of one second
        assert abs(loudest - 24000 / 9 / (2 * np.pi)) < 3
    assert encode_sound(samples[:0], "wav") == wav_header(24000, 0)


@pytest.mark.parametrize(("sound_format", "delay"), [("mp3", 1105), ("opus", 0), ("aac", 2048)])
def test_sound_leaves_as_it_is_made_without_gaps_or_clicks(sound_format, delay) -> None:
    """delay: samples of silence before the sound."""
    at_s = np.arange(5 * 24000) / 24000
    samples = (0.4 * np.sin(2 * np.pi * 150 * at_s * (1 + at_s / 5))).astype(np.float32)
    encoder, once = SoundEncoder(sound_format), SoundEncoder(sound_format)
    ends = [1365, *range(3285, 24000, 1920), len(samples) - 1]
    pieces = [encoder.push(part) for part in np.split(samples, ends)]
    assert all(pieces[:-1])
    made = b"".join(pieces) + encoder.finish()
    assert made == once.push(samples) + once.finish()
    heard = load_waveform({"audio": made}, 24000, "made")[delay : delay + len(samples)]
    whole = load_waveform({"audio": encode_sound(samples, sound_format)}, 24000, "whole")
    whole = whole[delay * (sound_format == "aac") :]  # a whole MP3's header has its delay
    np.testing.assert_allclose(heard[:-2400], whole[: len(heard)][:-2400], atol=1e-4)
    assert np.abs(heard - samples[: len(heard)])[2400:-2400].max() < 0.04


def test_memory_of_an_idle_server_goes_back_every_few_seconds(monkeypatch) -> None:
    now_s, freed, memory = [0.0], list[float](), IdleMemory()
    monkeypatch.setattr(heap, "give_back", lambda: freed.append(now_s[0]))
    monkeypatch.setattr(heap, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    for now_s[0] in (0.0, LOOK_S - 1, LOOK_S, LOOK_S + 1, 3 * LOOK_S):
        memory.look()
    assert freed == [0.0, LOOK_S, 3 * LOOK_S]


HOSTILE = "/\x1b[31m\x9b31m\x7f\u202e\u2066\u200f\u200b\u2028\u2029\ufeff\U000e0001\ud800"


def test_a_line_of_the_log_has_nothing_that_changes_what_a_terminal_shows() -> None:
    fields = {
        "msg": HOSTILE,
        "levelname": "INFO",
        "levelno": logging.INFO,
        "path": HOSTILE,
        "text": "schön, 鍵 😀",
    }
    line = JsonFormatter().format(logging.makeLogRecord(fields))
    assert line.isprintable()
    assert "schön, 鍵 😀" in line
    assert (json.loads(line)["path"], json.loads(line)["event"]) == (HOSTILE, HOSTILE)
    human = HumanFormatter().format(logging.makeLogRecord(fields))
    assert human.isprintable()
    assert "schön, 鍵 😀" in human
    assert human.count(json.dumps(HOSTILE[1:4])[1:-1]) == 2


def of_request(**fields: Any) -> logging.LogRecord:
    known = {
        "msg": "request",
        "levelno": logging.INFO,
        "method": "POST",
        "path": "/v1/audio/speech",
        "seconds": 0.25,
    }
    return logging.makeLogRecord(known | fields)


def test_a_client_forges_no_line_and_no_field_of_the_log_for_people() -> None:
    forged = "x\n12:00:00 200 GET / status=200"
    record = of_request(status=404, path=f"/{forged}", param=forged, warnings=[forged])
    try:
        raise ValueError(forged)
    except ValueError:
        record.exc_info = sys.exc_info()
    line, *traceback = HumanFormatter().format(record).splitlines()
    assert f"POST {json.dumps('/' + forged)} 0.25 s" in line
    assert f"param={json.dumps(forged)} warnings=" in line
    assert all(inner.startswith("    ") for inner in traceback)
    assert traceback[-1] == "    12:00:00 200 GET / status=200"


@pytest.mark.parametrize(
    ("form", "on_terminal", "human"),
    [("auto", True, True), ("auto", False, False), ("human", False, True), ("json", True, False)],
)
def test_the_log_is_for_people_on_a_terminal_and_json_elsewhere(
    form, on_terminal, human, monkeypatch
) -> None:
    ours = logging.getLogger("qwen3_omni_neuron")
    for name in ("qwen3_omni_neuron", "uvicorn"):
        log = logging.getLogger(name)
        for changed in ("handlers", "propagate", "level"):
            monkeypatch.setattr(log, changed, getattr(log, changed))
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: on_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    log_to_stderr("info", form)
    ours.info("ready", extra={"url": "http://127.0.0.1:8000"})
    line = stderr.getvalue()
    assert line.endswith(" ready url=http://127.0.0.1:8000\n") == human
    assert line.startswith("{") == (not human)


def test_a_turnstile_lets_one_through_in_each_round_of_the_event_loop() -> None:
    passed: list[str] = []

    async def run() -> None:
        turnstile, loop = Turnstile(), asyncio.get_running_loop()

        async def wait(name: str) -> None:
            await turnstile.wait()
            passed.append(name)
            loop.call_soon(passed.append, "else")

        await asyncio.gather(*map(wait, "abcd"))
        for _ in range(3):
            await asyncio.sleep(0)
        await wait("e")

    asyncio.run(run())
    between = "".join(passed).split("else")
    assert between[:4] == list("abcd")
    assert passed.count("e") == 1


class Connection:
    """A connection that keeps its request's scope, as uvicorn's do."""

    def __init__(self) -> None:
        self.scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": []}

    async def receive(self) -> Message:
        return await asyncio.Future[Message]()

    async def send(self, message: Message) -> None:
        pass


def test_a_request_is_freed_as_it_ends() -> None:
    """Not when the garbage collector comes: many bodies would wait for that."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask() -> None:
        gate, connection = Gate(app, Service(ServerSettings())), Connection()
        ended = weakref.ref(connection)
        await gate(connection.scope, connection.receive, connection.send)
        await asyncio.sleep(0)  # the task that waited for the client to leave ends
        del connection
        assert ended() is None

    gc.disable()
    try:
        asyncio.run(ask())
    finally:
        gc.enable()
