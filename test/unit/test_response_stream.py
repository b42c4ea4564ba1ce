"""A reply whose client is gone: what of it stays in the conversation, and that it counts once."""

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from qwen3_omni_neuron.errors import MessageError
from qwen3_omni_neuron.prompt.turns import Reply
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.openai.fields import Voices
from qwen3_omni_neuron.serving.realtime.events import Connection
from qwen3_omni_neuron.serving.realtime.items import ITEM_BYTES, ConversationItems
from qwen3_omni_neuron.serving.realtime.response_stream import Response
from qwen3_omni_neuron.serving.realtime.responses import Responses
from qwen3_omni_neuron.serving.realtime.session_config import first_config, response_config
from qwen3_omni_neuron.serving.service import Turnstile
from testing.scripted_model import ScriptedStream

pytestmark = pytest.mark.anyio

NONE, ONE = ("response.created", "rate_limits.updated"), "Hello"
EVENTS = [
    *(*NONE, "response.output_item.added", "conversation.item.added"),
    *("response.content_part.added", "response.output_text.delta", "response.output_text.done"),
    *("response.content_part.done", "conversation.item.done", "response.output_item.done"),
    "response.done",
]


class History:
    """Session and account of a conversation. held: bytes in the account."""

    def __init__(self) -> None:
        self.turns: list[Any] = []
        self.held = 0

    def remove(self, turn: Any) -> None:
        if turn not in self.turns:
            raise MessageError("the turn is not in the history")
        self.turns.remove(turn)

    def add(self, size: int) -> None:
        self.held += size

    def release(self, size: int) -> None:
        self.held -= size


VOICES = Voices(())


class Replying:
    """A reply of these texts, from its beginning on. sent: kinds of its events."""

    def __init__(self, *texts: str, spoken: bool = False, speed: float = 1.0, **overrides: Any):
        self.texts, self.spoken, self.sent = texts, spoken, list[str]()
        self.config, self.overrides = first_config("m", VOICES), response_config(overrides, VOICES)
        self.config.audio.output.speed = speed
        self.history = History()
        self.seen: Callable[[str], Awaitable[None]] | None = None

    async def __aenter__(self) -> "Replying":
        service: Any = SimpleNamespace(settings=SimpleNamespace(log_content=False))
        service.model = SimpleNamespace(take=lambda: SimpleNamespace(info=service))
        service.thinks, service.metrics = False, SimpleNamespace(finished=lambda *_: None)
        service.rates, service.turnstile = SimpleNamespace(left=lambda _: []), Turnstile()
        context = Context("req_1", "WEBSOCKET", "/v1/realtime", "me")
        self._pool = ThreadPoolExecutor(1)
        connection = Connection(self._send, self._pool, service, context, False)
        history: Any = self.history
        omni: Any = None
        self.items = ConversationItems(connection, omni, history, history)
        stream: Any = ScriptedStream(self.texts, self.spoken, None)
        stream.reply = Reply(False, 15.0)
        history.turns.append(stream.reply)
        self.reply: Reply = stream.reply
        before = self.items.begin_reply(stream.reply, 1.0)
        shared = connection, self.items, lambda: None
        self.response = Response(self.config, self.overrides, self.spoken, self.spoken, *shared)
        self.response.begin(stream, before)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.shutdown()

    async def _send(self, message: Any) -> None:
        self.sent.append(json.loads(message["text"])["type"])
        if self.seen is not None:
            await self.seen(self.sent[-1])

    async def ends(self) -> None:
        """Wait until it has sent what it can."""
        while self.response.running:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("way", ["lost", "leaves"])
@pytest.mark.parametrize("event", EVENTS)
async def test_a_reply_whose_client_is_gone_is_settled_once(way, event) -> None:
    """Gone before any event: the connection is lost at it, or it waits for a client that leaves."""
    reached = asyncio.Event()

    async def seen(kind: str) -> None:
        if kind == event:
            reached.set()
            if way == "lost":
                raise OSError("gone")
            await asyncio.Event().wait()

    async with Replying(ONE) as made:
        made.seen = seen
        await reached.wait()
        if way == "lost":
            await made.ends()
        await made.response.end()
        at = EVENTS.index(event)
        assert made.sent == EVENTS[: at + 1]
        if event in NONE:  # the client never saw it
            assert (made.history.turns, made.history.held) == ([], 0)
            return
        assert len(made.history.turns) == 1
        told = ONE if at >= EVENTS.index("response.output_text.delta") else ""
        assert made.history.held == made.reply.size == ITEM_BYTES + sys.getsizeof(told)
        whole = at > EVENTS.index("response.content_part.done")
        assert made.reply.shown["status"] == ("completed" if whole else "incomplete")


@pytest.mark.parametrize("texts", [(), (ONE,)])
async def test_a_reply_that_was_made_to_its_end_is_settled_once(texts) -> None:
    async with Replying(*texts) as made:
        await made.ends()
        turns, held = list(made.history.turns), made.history.held
        assert len(turns) == len(texts)
        await made.response.end()
        assert (made.history.turns, made.history.held) == (turns, held)


async def test_playback_is_of_the_sound_that_was_sent() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    async with Replying(ONE, call, spoken=True, speed=2.0, conversation="none") as made:
        await made.ends()
        assert "response.function_call_arguments.done" in made.sent
        assert made.response.playback.sent_s == 0.04  # half of one chunk


@pytest.mark.parametrize("made", [False, True], ids=["being made", "made"])
async def test_a_reply_whose_session_ends_as_it_begins_leaves_nothing(made) -> None:
    """The session's thread makes it, or has made it, and can't be stopped."""
    began, go = threading.Event(), threading.Event()
    stream: Any = ScriptedStream((ONE,), False, None)
    stream.reply = Reply(False, 15.0)

    class Answering(History):
        def respond(self, *_: Any, **__: Any) -> Any:
            self.turns.append(stream.reply)
            began.set()
            go.wait()
            return stream

    info = SimpleNamespace(info=SimpleNamespace(thinks=False))
    service: Any = SimpleNamespace(model=SimpleNamespace(take=lambda: info))
    service.settings = SimpleNamespace(request_timeout_s=1.0, api_keys=())
    service.rates = SimpleNamespace(count=lambda _: None)
    service.requests = SimpleNamespace(place=lambda _: nullcontext())
    service.readers = SimpleNamespace(turn=lambda _: nullcontext())
    history: Any = Answering()
    asked: Any = SimpleNamespace(role="user", id="item_1")
    history.turns.append(asked)
    nothing: Any = None
    with ThreadPoolExecutor(1) as pool:
        context = Context("req_1", "WEBSOCKET", "/v1/realtime", "me")
        connection = Connection(nothing, pool, service, context, False)
        items = ConversationItems(connection, nothing, history, history)
        responses = Responses(connection, items, nothing)
        configs = first_config("m", VOICES), response_config(None, VOICES)
        starting = asyncio.create_task(responses.start(*configs))
        await asyncio.to_thread(began.wait)
        if made:
            go.set()
            pool.submit(int).result()  # the event loop has not heard of it yet
        starting.cancel()
        await asyncio.wait((starting,))
        go.set()
        await responses.close()
        left = await connection.in_thread(lambda: (history.turns, history.held))
        assert left == ([asked], 0)
        assert not list(stream._events), "its stream is closed"
