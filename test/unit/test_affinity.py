"""Affinity: keys of conversations, and the middleware that adds them before Ray routes."""

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3_omni_neuron.serving.fleet import affinity
from qwen3_omni_neuron.serving.fleet.affinity import AffinityMiddleware, conversation_key

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "What colour is the sky?"}
REPLY = {"role": "assistant", "content": "Blue."}
SECOND = {"role": "user", "content": "Why?"}
PATH = "/omni/v1/chat/completions"
HOSTILE = (
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b"\xff\xfe{",
    b'\xef\xbb\xbf{"messages": []}',
    '{"messages": [{"role": "user", "content": "hi"}]}'.encode("utf-16"),
    b'{"messages": 5}',
    b'{"messages": {"role": "user"}}',
    b'{"messages": [5, null, "user", ["role", "user"]]}',
    b'{"messages": [{"role": ["user"]}]}',
    b'{"messages": [{"role": "system", "content": "x"}]}',
    b'{"messages": [{"role": "user"',
    b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"messages": [{"role": "user", "content": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}]}",
    b'{"n": ' + b"9" * 100_000 + b', "messages": [{"role": "user"}]}',
)


def body_of(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"messages": messages, **more}).encode()


def test_all_turns_of_a_conversation_have_one_key() -> None:
    key = conversation_key(body_of(SYSTEM, FIRST))
    assert key is not None
    assert conversation_key(body_of(SYSTEM, FIRST, REPLY, SECOND, model="m", stream=True)) == key
    spaced = json.dumps({"messages": [SYSTEM, dict(reversed(FIRST.items()))]}, indent=3).encode()
    assert conversation_key(spaced) == key


def test_conversations_under_one_system_prompt_have_different_keys() -> None:
    keys = [
        conversation_key(body_of(SYSTEM, FIRST)),
        conversation_key(body_of(SYSTEM, SECOND)),
        conversation_key(body_of(FIRST)),
        conversation_key(body_of(SYSTEM, FIRST), b"Bearer another"),
        conversation_key(body_of(SYSTEM, FIRST, cache_key="another")),
    ]
    assert None not in keys and len(set(keys)) == len(keys)


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: repr(body[:40]))
def test_a_body_that_is_no_conversation_has_no_key(body) -> None:
    assert conversation_key(body) is None


class Client:
    """A client that sends a body in pieces, and what the application behind the middleware got.

    A piece None is a client that leaves. Where the pieces end before the body does, it waits.
    """

    def __init__(self, pieces: Sequence[bytes | None], complete: bool = True):
        last = len(pieces) - 1
        self._sent = [
            {"type": "http.disconnect"}
            if piece is None
            else {"type": "http.request", "body": piece, "more_body": not complete or i < last}
            for i, piece in enumerate(pieces)
        ]
        self.messages = list(self._sent)
        self.got: list[Any] = []
        self.headers: list[tuple[bytes, bytes]] = []

    async def receive(self) -> Any:
        await asyncio.sleep(0)
        if not self._sent:
            await asyncio.Event().wait()
        return self._sent.pop(0)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers = scope["headers"]
        for _ in self.messages:
            self.got.append(await receive())

    def ask(
        self,
        headers: Sequence[tuple[bytes, bytes]] = (),
        path: str = PATH,
        method: str = "POST",
        kind: str = "http",
    ) -> list[bytes]:
        """Send the request. Returns the session headers that the application saw."""
        scope = {"type": kind, "path": path, "headers": list(headers)}
        scope |= {"method": method} if kind == "http" else {}
        before = list(scope["headers"])

        async def nothing(message: Any) -> None: ...

        async def run() -> int:
            await AffinityMiddleware(self.app)(scope, self.receive, nothing)
            await asyncio.sleep(0)
            return len(asyncio.all_tasks())

        assert asyncio.run(run()) == 1, "a task is left behind"
        assert scope["headers"] == before  # another middleware's
        assert self.got == self.messages
        return [value for name, value in self.headers if name == b"x-session-id"]


@given(st.lists(st.integers(0, 200), max_size=5), st.booleans())
def test_a_body_goes_on_unchanged_with_its_key(cuts, known_length) -> None:
    body = body_of(SYSTEM, FIRST)
    at = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[i:j] for i, j in pairwise(at)]
    headers = [(b"authorization", b"Bearer one")]
    headers += [(b"content-length", str(len(body)).encode())] if known_length else []
    assert Client(pieces).ask(headers) == [conversation_key(body, b"Bearer one").encode()]


def test_no_more_of_a_body_is_read_than_its_beginning(monkeypatch) -> None:
    """The proxies are all clients', and have checked no API key."""
    read: list[int] = []
    parse = affinity.from_json

    def watched(text: bytes, **options: Any) -> Any:
        read.append(len(text))
        return parse(text, **options)

    monkeypatch.setattr(affinity, "from_json", watched)
    sound = {"type": "input_audio", "input_audio": {"data": "A" * (1 << 20)}}
    body = body_of(SYSTEM, FIRST, REPLY, {"role": "user", "content": [sound]})
    pieces = [body[at : at + (1 << 16)] for at in range(0, len(body), 1 << 16)]
    client = Client(pieces)
    passed: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(len(client._sent))
        await Client.app(client, scope, receive, send)

    client.app = app  # type: ignore[method-assign]
    (key,) = client.ask()
    assert key.decode() == conversation_key(body_of(SYSTEM, FIRST))
    assert passed == [len(pieces) - 5]  # of 64 KiB each
    assert max(read) == affinity.BEGINNING_BYTES


def test_all_turns_have_one_key_where_the_first_message_is_longer_than_what_is_read() -> None:
    sound = "A" * affinity.BEGINNING_BYTES
    first = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": sound}}]}
    key = conversation_key(body_of(SYSTEM, first))
    assert key is not None
    assert conversation_key(body_of(SYSTEM, first, REPLY, SECOND, stream=True)) == key
    assert conversation_key(body_of(FIRST, first)) != key
    long = {"role": "system", "content": sound}
    assert conversation_key(body_of(long, FIRST)) is None  # who asks is not read


def test_the_clients_own_header_stays_unless_it_is_empty() -> None:
    assert Client([body_of(FIRST)]).ask([(b"x-session-id", b"mine")]) == [b"mine"]
    assert len(Client([body_of(FIRST)]).ask([(b"x-session-id", b"")])) == 2  # Ray takes the last


RESPONSES = "/omni/v1/responses"


def input_of(given: Any, **more: Any) -> bytes:
    return json.dumps({"input": given, **more}).encode()


def test_all_turns_of_responses_have_one_key() -> None:
    (key,) = Client([input_of("Hello", instructions="Be brief.")]).ask(path=RESPONSES)
    begun = [{"role": "user", "content": "Hello"}, {"type": "item_reference", "id": "msg_1"}]
    again = input_of([*begun, SECOND], instructions="Be brief.", stream=True)
    assert Client([again]).ask(path=RESPONSES) == [key]
    for other in (input_of("Hello"), input_of("Hi", instructions="Be brief.")):
        assert Client([other]).ask(path=RESPONSES) != [key]


def test_what_names_a_response_has_the_key_in_its_id() -> None:
    key = "0123456789abcdef" * 2
    name = "resp_" + "f" * 32 + key
    asked = input_of("And then?", previous_response_id=name)
    assert Client([asked]).ask(path=RESPONSES) == [key.encode()]
    for method in ("GET", "DELETE"):
        assert Client([b""]).ask(path=f"{RESPONSES}/{name}", method=method) == [key.encode()]
    asked_items = f"{RESPONSES}/{name}/input_items"
    assert Client([b""]).ask(path=asked_items, method="GET") == [key.encode()]
    for other in ("resp_" + "f" * 32, f"{name}0", name.upper(), ""):
        assert Client([b""]).ask(path=f"{RESPONSES}/{other}", method="GET") == []
        (found,) = Client([input_of("Hi", previous_response_id=other)]).ask(path=RESPONSES)
        assert found.decode() == conversation_key(input_of("Hi"))


def test_the_callback_makes_the_middleware_of_rays_proxies() -> None:
    (made,) = affinity.proxy_middlewares()
    assert made.cls is AffinityMiddleware
    module, _, name = affinity.CALLBACK.rpartition(".")
    assert (module, getattr(affinity, name)) == (affinity.__name__, affinity.proxy_middlewares)
