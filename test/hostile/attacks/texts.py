"""Too much text, JSON that is too deep or too wide, and forms of too many parts."""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from test.hostile.attacks.good_client import MODEL
from test.hostile.attacks.kinds import Kind
from test.hostile.attacks.outcomes import ANSWERED, CUT, REFUSED, Outcome
from test.hostile.attacks.over_http import chat, head_of, post, raw, transcribe, user
from test.hostile.attacks.over_socket import outcome_of, session
from test.hostile.attacks.target import Target
from testing.http_client import form
from testing.websocket_client import send

MIB = 1 << 20
CHAT, SPEECH, TRANSCRIPTIONS = (
    f"/v1/{name}" for name in ("chat/completions", "audio/speech", "audio/transcriptions")
)
NO = frozenset((REFUSED,))
NO_OR_CUT = frozenset((REFUSED, CUT))
EITHER = frozenset((ANSWERED, REFUSED))
LONG_TEXT = "say three five " * (8 * MIB // 15)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LONG_TOOL = {**TOOL, "function": {**TOOL["function"], "description": LONG_TEXT}}  # type: ignore[dict-item]


def chatting(label: str = "", **fields: Any) -> Callable[[Target], list[Outcome]]:
    """Return an attack: one chat request with these fields."""
    return lambda target: [chat(target, label, **fields)]


def long_texts_of_other_fields(target: Target) -> list[Outcome]:
    """Send 8 MiB of text in fields that should be short."""
    speech = {"model": MODEL, "voice": "Ethan"}
    found = [
        post(target, SPEECH, json.dumps({**speech, **more}).encode(), label=label)
        for label, more in (
            ("speech input", {"input": LONG_TEXT}),
            ("speech instructions", {"input": "five", "instructions": LONG_TEXT}),
        )
    ]
    found.append(chat(target, "stop", stop=[LONG_TEXT]))
    found.append(chat(target, "user", model=LONG_TEXT))
    long_form = form({"model": MODEL.encode(), "instruction": LONG_TEXT.encode()}, b"RIFF")
    return [*found, post(target, TRANSCRIPTIONS, *long_form, "transcription instruction")]


def body_around(inner: bytes) -> bytes:
    """Return a chat request with `inner` as its metadata."""
    hello = json.dumps([user("hello")]).encode()
    return b'{"model": "%s", "messages": %s, "metadata": %s}' % (MODEL.encode(), hello, inner)


def numbers_without_end(target: Target) -> list[Outcome]:
    """Send numbers whose parsing time grows with the square of their digits."""
    cases = {"integer": b"1" * 4 * MIB, "fraction": b"0." + b"1" * 4 * MIB, "exponent": b"1e99999"}
    return [
        post(target, CHAT, body_around(value).replace(b'"metadata"', b'"temperature"'), label=label)
        for label, value in cases.items()
    ]


def broken(target: Target) -> list[Outcome]:
    """Send invalid JSON, invalid at its end or in all of it."""
    cases = {
        "no UTF-8": b'"' + b"\xff" * 8 * MIB + b'"',
        "no end": b"[" + b'"a",' * (2 * MIB),
        "one string": b'"' + b"\\u0041" * MIB,
        "NUL": b"\0" * 8 * MIB,
        "half of a pair": b'"' + b"\\ud800" * MIB + b'"',
        "many keys": b"{" + b",".join(b'"%d":0' % i for i in range(2_000_000)) + b"}",
    }
    return [post(target, CHAT, body_around(value), label=k) for k, value in cases.items()]


def many_small_things(target: Target) -> list[Outcome]:
    """Send lists of 100,000 items where an honest request has a few."""
    part = {"type": "text", "text": "a"}
    return [
        chat(target, "messages", messages=100_000 * [user("a")]),
        chat(target, "parts", messages=[user(*(100_000 * [part]))]),
        chat(target, "tools", tools=100_000 * [TOOL]),
        chat(target, "stop", stop=100_000 * ["a"]),
    ]


def speaking(target: Target, text: str, label: str) -> Outcome:
    """Ask for speech, and disconnect while it is made."""
    body = json.dumps({"model": MODEL, "voice": "Ethan", "input": text}).encode()
    return post(target, SPEECH, body, label=label, wait_s=3, leave=True)


def speech_texts(target: Target) -> list[Outcome]:
    """Ask for speech of the longest texts, each made of one character."""
    texts = {
        "letters": "a",
        "emoji": "\U0001f600",
        "dots": ".",
        "newlines": "\n",
        "marks": "\u0301",
    }
    return [speaking(target, 32_768 * text, label) for label, text in texts.items()]


# In realtime

RealtimeEvent = tuple[str, dict[str, Any]]
ASK: RealtimeEvent = ("response.create", {})


def realtime(*events: RealtimeEvent, label: str = "") -> Callable[[Target], list[Outcome]]:
    """Return an attack: a session that sends events, the last of which asks for a response."""

    def attack(target: Target) -> list[Outcome]:
        with session(target, output_modalities=["text"]) as made:
            sent = sum(send(made, kind, **fields) for kind, fields in events)
            return [outcome_of(made, sent, label=label)]

    return attack


def text_item(text: str) -> RealtimeEvent:
    """Return the event that puts a user's text into the conversation."""
    content = [{"type": "input_text", "text": text}]
    item = {"type": "message", "role": "user", "content": content}
    return "conversation.item.create", {"item": item}


def raw_event(made: Callable[[], bytes], around: str) -> Callable[[Target], list[Outcome]]:
    """Return an attack: a session with one event: the text `around`, with `made` in place of X."""

    def attack(target: Target) -> list[Outcome]:
        event = around.replace("X", made().decode())
        with session(target) as opened:
            opened.send(event)
            return [outcome_of(opened, len(event))]

    return attack


def long_texts_of_a_session(target: Target) -> list[Outcome]:
    """Send 8 MiB as instructions of a session, of a response, and as a tool."""
    tool = {"type": "function", "name": "f", "description": LONG_TEXT, "parameters": {}}
    hello = text_item("hello")
    plans: dict[str, RealtimeEvent] = {
        "session": ("session.update", {"session": {"type": "realtime", "instructions": LONG_TEXT}}),
        "response": ("response.create", {"response": {"instructions": LONG_TEXT}}),
        "tools": ("session.update", {"session": {"type": "realtime", "tools": [tool]}}),
    }
    return [
        one
        for label, event in plans.items()
        for one in realtime(hello, event, *([] if label == "response" else [ASK]), label=label)(
            target
        )
    ]


def small_items(target: Target) -> list[Outcome]:
    """Put 20,000 items into one conversation, or as many as can be sent in half a minute."""
    end_s = time.monotonic() + (5 if target.short else 30)
    with session(target, output_modalities=["text"]) as made:
        kind, fields = text_item("a")
        sent = 0
        for _ in range(200):
            for _ in range(100):
                sent += send(made, kind, **fields)
            for _ in range(100):
                found = outcome_of(made, sent, "conversation.item.done")
                if found.how != ANSWERED or time.monotonic() > end_s:
                    return [found]
        sent += send(made, "response.create")
        return [outcome_of(made, sent)]


# Forms


def bad_forms(target: Target) -> list[Outcome]:
    """Send forms with thousands of parts, with endless names, and without an end."""
    end = b"--b--\r\n"
    part = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\nx\r\n'
    bodies = {
        "5000 parts": b"".join(part % (b"p%d" % i) for i in range(5000)) + end,
        "5000 files": 5000 * (part % b'file"; filename="a') + end,
        "name of 1 MiB": part % (b"n" * MIB) + end,
        "header of 8 MiB": b"--b\r\nx: " + b"y" * 8 * MIB + b"\r\n\r\nx\r\n" + end,
        "100,000 headers of a part": b"--b\r\n" + 100_000 * b"a: b\r\n" + b"\r\nx\r\n" + end,
        "no end": part % b"model" + b"x" * 4 * MIB,
        "delimiters alone": b"--b\r\n" * (4 * MIB),
        "nearly delimiters": b"\r\n--" * (7 * MIB) + end,
        "noise": bytes(range(256)) * (32 * 1024),
    }
    kind = "multipart/form-data; boundary=b"
    found = [
        post(target, TRANSCRIPTIONS, body, {"content-type": kind}, label)
        for label, body in bodies.items()
    ]
    long = {"content-type": f"multipart/form-data; boundary={'b' * 20_000}"}
    found.append(post(target, TRANSCRIPTIONS, b"--b", long, "boundary of 20,000"))
    return [*found, transcribe(target, bytes(23 * MIB), label="23 MiB of zeros")]


def bodies_of(kind: str) -> Callable[[Target], list[Outcome]]:
    """Return an attack: 32 MiB and more, by their length, in chunks, or with a false length."""

    def chunks(target: Target) -> Iterator[bytes]:
        yield head_of(target, CHAT, None)
        for _ in range(40):
            yield b"100000\r\n" + b"x" * MIB + b"\r\n"

    def attack(target: Target) -> list[Outcome]:
        if kind == "chunks":
            return [raw(target, b"".join(chunks(target)))]
        return [raw(target, head_of(target, CHAT, 40 * MIB) + b"x" * 33 * MIB)]

    return attack


def _deep(bytes_: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    depth = bytes_ // (len(opening) + len(closing))
    return opening * depth + closing * depth


def _posted(body: Callable[[], bytes], path: str = CHAT) -> Callable[[Target], list[Outcome]]:
    return lambda target: [post(target, path, body())]


def _metadata(inner: Callable[[], bytes]) -> Callable[[Target], list[Outcome]]:
    return _posted(lambda: body_around(inner()))


def _wide(bytes_: int) -> bytes:
    return b"[" + b",".join([b"[]"] * (bytes_ // 3)) + b"]"


KINDS = (
    Kind("text-chat", "8 MiB of text in a chat", chatting(messages=[user(LONG_TEXT)]), NO),
    Kind("text-tools", "8 MiB as a tool's description", chatting(tools=[LONG_TOOL]), NO),
    Kind("text-other-fields", "8 MiB as speech input, stop, ...", long_texts_of_other_fields, NO),
    Kind(
        "text-realtime-item",
        "8 MiB of text as a realtime item, then a response",
        realtime(text_item(LONG_TEXT), ASK),
        NO,
    ),
    Kind("text-realtime-fields", "8 MiB as instructions and tools", long_texts_of_a_session, NO),
    Kind("text-speech", "speech of 32,768 characters, left after 3 s", speech_texts, EITHER),
    Kind("json-wide", "30 MiB of metadata [[],[],...]", _metadata(partial(_wide, 30 * MIB)), NO),
    Kind("json-deep", "8 MiB of [[[...]]]", _metadata(partial(_deep, 8 * MIB)), NO),
    Kind(
        "json-wide-realtime",
        "21 MB realtime event of metadata [[],[],...]",
        raw_event(
            partial(_wide, 21_000_000), '{"type": "response.create", "response": {"metadata": X}}'
        ),
        NO,
    ),
    Kind(
        "json-deep-realtime",
        "4 MiB realtime event of [[[...]]]",
        raw_event(partial(_deep, 4 * MIB), '{"type": "session.update", "session": X}'),
        NO,
    ),
    Kind("json-numbers", "numbers of 4 MiB of digits", numbers_without_end, EITHER),
    Kind("json-broken", "8 MiB that is no JSON, or none that is taken", broken, NO),
    Kind("many-messages", "100,000 messages, parts, tools, ...", many_small_things, NO),
    Kind("many-realtime-items", "items of one letter, for half a minute", small_items, EITHER),
    Kind("forms", "forms of 5000 parts, endless names, no end", bad_forms, NO_OR_CUT),
    Kind("body-declared", "a body that says it has 40 MiB", bodies_of("length"), NO_OR_CUT),
    Kind("body-chunks", "a chunked body of 40 MiB", bodies_of("chunks"), NO_OR_CUT),
)
