"""Realtime sessions: client events in, server events out, until either side ends."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.errors import Qwen3OmniError
from qwen3_omni_neuron.serving.edge.sending import AnswerSender
from qwen3_omni_neuron.serving.openai.bodies import check_model
from qwen3_omni_neuron.serving.openai.errors import RETRY_S, ApiError, wrong_value
from qwen3_omni_neuron.serving.openai.fields import REALTIME
from qwen3_omni_neuron.serving.openai.reply import new_id
from qwen3_omni_neuron.serving.realtime import dashscope, events, turn_detector
from qwen3_omni_neuron.serving.realtime.audio_codecs import TURN_RATE, Samples
from qwen3_omni_neuron.serving.realtime.dashscope import DASHSCOPE_HEADER, DASHSCOPE_PATH
from qwen3_omni_neuron.serving.realtime.events import Connection, Json
from qwen3_omni_neuron.serving.realtime.input_buffer import InputBuffer
from qwen3_omni_neuron.serving.realtime.items import ConversationItems
from qwen3_omni_neuron.serving.realtime.responses import Responses, reply_options
from qwen3_omni_neuron.serving.realtime.session_config import (
    SessionConfig,
    SessionType,
    first_config,
    merged,
    response_config,
    shown,
    speaks,
    updated,
    without_mcp,
)
from qwen3_omni_neuron.serving.realtime.transcribing import Transcriber
from qwen3_omni_neuron.serving.realtime.turn_detector import (
    Paused,
    Speech,
    Started,
    TimedOut,
    TurnEvent,
)
from qwen3_omni_neuron.serving.service import Service

PATH = "/v1/realtime"
PATHS = (PATH, DASHSCOPE_PATH)
TOO_LONG, RESTART = 1000, 1012  # WebSocket close codes
_TICK_S = 0.1
_SMALL_EVENT = 1 << 16  # characters of an event that is parsed without a thread
_CONFIG_COPIES = 4  # a configuration's JSON, objects, options and turns


class RealtimeSockets:
    """ASGI application for a server's sessions, in one event loop."""

    def __init__(self, service: Service):
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one session. Raises ApiError before it begins."""
        service, context = self._service, scope["context"]
        answer: AnswerSender = scope["answer"]
        asked = parse_qs(scope["query_string"].decode("latin-1"))
        if "model" in asked:
            model = asked["model"][0]
            check_model(service, model)
            service.count_without_effect(REALTIME, {"model": model})
        only_transcribes = asked.get("intent") == ["transcription"]
        omni = service.model.take()
        if service.model.sessions_end_in_s is not None:
            message = "the server ends: open the session again."
            raise ApiError(503, message, "model_draining", retry_after_s=RETRY_S)
        place = service.sessions.place(context.owner)
        service.metrics.realtime_sessions.inc()
        pool = ThreadPoolExecutor(1, "realtime")
        try:
            chosen = "realtime" if "realtime" in scope["subprotocols"] else None
            await receive()  # the message "websocket.connect"
            await answer.send({"type": "websocket.accept", "subprotocol": chosen})
            as_dashscope = context.path == DASHSCOPE_PATH or DASHSCOPE_HEADER in dict(
                scope["headers"]
            )
            connection = Connection(send, pool, service, context, as_dashscope)
            kind: SessionType = "transcription" if only_transcribes else "realtime"
            await LiveSession(connection, omni, receive, kind).serve()
        finally:
            pool.shutdown(wait=False)
            place.leave()
            service.metrics.realtime_sessions.dec()


class LiveSession:
    """One session: passes each event to its part."""

    def __init__(
        self, connection: Connection, omni: Qwen3Omni, receive: Receive, kind: SessionType
    ):
        """kind: the session's initial type."""
        service = connection.service
        self._connection, self._service, self._receive = connection, service, receive
        self._session = omni.session(literal_text=True)
        self._account = service.account_of_session(connection.context.owner)
        self._voices = service.voices_of(omni)
        self._config = first_config(service.model.name, self._voices, kind)
        self._by_meaning = turn_detector.judges(omni)
        self._config_bytes = 0  # reserved for the configuration
        self._updated = self._refused = False  # the client's session.update once was
        self._id = new_id("sess_")
        self._expires_s = time.monotonic() + service.settings.max_realtime_s
        self._expires_at = int(time.time() + service.settings.max_realtime_s)
        self._send, self._in_thread = connection.send, connection.in_thread
        self._items = ConversationItems(connection, omni, self._session, self._account)
        self._transcriber = Transcriber(connection, self._account, self._config)
        form, keeps = self._config.audio.input.format, self._config.answers
        self._input = InputBuffer(connection, self._items, self._transcriber, form, keeps)
        self._responses = Responses(connection, self._items, self._input)

    async def serve(self) -> None:
        """Serve until the client leaves, the session's time is over, or the server ends."""
        steps = (self._read(), self._watch())
        tasks = [asyncio.create_task(step) for step in steps]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._transcriber.close()
            try:
                await self._responses.close()
            finally:
                self._connection.pool.submit(self._session.close)
                self._account.close()
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                if not isinstance(error, events.ClientGoneError):
                    raise error
                self._connection.context.error = "client_left"

    async def _read(self) -> None:
        first = dashscope.FIRST if self._connection.is_dashscope else {}
        first = merged(first, self._connection.context.session)  # from the client's secret
        await self._set(await self._with(first))
        self._updated = False
        await self._show("session.created")
        await self._in_thread(self._detect)
        while (message := await self._receive())["type"] != "websocket.disconnect":
            await self._heard(message.pop("text", None))

    async def _heard(self, text: str | None) -> None:
        given: Json = {}
        try:
            if text is None:
                message = "events are sent as text, not as bytes."
                raise ApiError(400, message, "invalid_json")
            call = self._at_once if len(text) < _SMALL_EVENT else self._connection.in_turn
            given = await call(events.parse_event, text)
            del text
            heard = dashscope.heard(given) if self._connection.is_dashscope else given
            await self._answer(await call(events.read_event, heard))
        except events.ClientGoneError:
            raise
        except Exception as error:
            self._refused |= given.get("type") == "session.update"
            event_id = given.get("event_id")
            event_id = event_id[:512] if isinstance(event_id, str) else None
            await self._connection.send_error(self._connection.failed(error), event_id)

    async def _at_once(self, call: Callable[..., Any], *given: Any) -> Any:
        return call(*given)

    async def _watch(self) -> None:
        """End the session, after an announcement, when its or the server's time is over."""
        while time.monotonic() < self._expires_s:
            await asyncio.sleep(_TICK_S)
            left_s = self._service.model.sessions_end_in_s
            if left_s is None:
                continue
            if not self._responses.draining:
                self._responses.draining = True
                message = (
                    "the server is shutting down: this session closes after the current response, "
                    f"in {left_s:.0f} s at the latest. Open another one."
                )
                failed = self._service.model.state == "failed"
                code = "server_failed" if failed else "server_draining"
                await self._connection.send_error(ApiError(503, message, code))
            if not left_s or not self._responses.running:
                return await self._close(RESTART, "the server ends")
        seconds = self._service.settings.max_realtime_s
        message = f"the session has reached its limit of {seconds:g} s. Begin another."
        await self._connection.send_error(ApiError(400, message, "session_expired"))
        return await self._close(TOO_LONG, "session_expired")

    async def _close(self, code: int, reason: str) -> None:
        message = {"type": "websocket.close", "code": code, "reason": reason}
        with suppress(OSError):
            await self._connection.raw_send(message)

    async def _answer(self, event: events.ClientEvent) -> None:
        match event:
            case events.SessionUpdate():
                await self._update(event.session)
            case events.Signal():
                await self._signalled(event.type)
            case events.Append():
                if self._refused and not self._updated:
                    raise ApiError(
                        400,
                        "the first session.update was refused, so the sound's format is unknown, "
                        "and sound is refused. Send a valid session.update first.",
                        "session_not_updated",
                        "audio",
                    )
                await self._react_to(await self._in_thread(self._input.push, event.audio))
            case events.ItemCreate():
                codec = self._input.codec
                await self._items.create(event.item, event.previous_item_id, codec)
            case events.ItemNamed(type="conversation.item.retrieve"):
                await self._items.retrieve(event.item_id, self._input.codec)
            case events.ItemNamed():
                await self._items.delete(event.item_id)
            case events.ItemTruncate():
                await self._items.truncate(event.item_id, event.content_index, event.audio_end_ms)
                self._responses.truncated(event.item_id)
            case events.ResponseCreate():
                sound = self._config.audio.output.format
                overrides = response_config(event.response, self._voices, sound)
                self._service.count_without_effect(REALTIME, event.response)
                await self._responses.start(self._config, overrides)
            case events.ResponseCancel():
                await self._responses.cancel(event.response_id)

    async def _signalled(self, kind: str) -> None:
        if kind == "session.finish":
            await self._responses.ended()
            await self._send("session.finished")
        elif kind == "input_audio_buffer.commit":
            turn, transcript = await self._input.commit(flush=True)
            if transcript is not None:
                self._transcriber.finish(transcript, turn)
        elif kind == "input_audio_buffer.clear":
            await self._input.clear()
        else:
            await self._responses.clear_output()

    # The session's configuration.

    async def _show(self, event: str) -> None:
        kind = "session" if self._config.answers else "transcription_session"
        made = {"id": self._id, "object": f"realtime.{kind}", "expires_at": self._expires_at}
        await self._send(event, session=made | await self._in_thread(shown, self._config))

    async def _with(self, given: Json) -> SessionConfig:
        known = self._voices, self._by_meaning
        config: SessionConfig = await self._in_thread(updated, self._config, given, *known)
        return config

    async def _update(self, given: Json) -> None:
        before = self._config
        given, refusal = without_mcp(given)
        config = await self._with(given)
        if config.type != before.type and (self._session.turns or not self._input.is_empty):
            message = (
                f"the session's type, {before.type}, can't change once there are items or sound. "
                "Open another session."
            )
            raise wrong_value(message, "session.type")
        await self._set(config)
        self._service.count_without_effect(REALTIME, given)
        await self._show("session.updated")
        if refusal is not None:
            raise refusal

    async def _set(self, config: SessionConfig) -> None:
        before = self._config
        await self._count(config)
        self._updated = True
        self._input.keeps = config.answers
        self._config = self._transcriber.config = config
        now, earlier = config.audio.input, before.audio.input
        if now.format != earlier.format:
            await self._react_to(await self._in_thread(self._input.set_format, now.format))
        if now.turn_detection != earlier.turn_detection:
            await self._in_thread(self._detect)

    async def _count(self, config: SessionConfig) -> None:
        """Set the session's instructions and options, and reserve their bytes. Raises ApiError."""
        size = _CONFIG_COPIES * len(await self._in_thread(config.model_dump_json))
        self._account.hold(size)
        try:
            if config.instructions != self._config.instructions:
                system = config.instructions or None
                await self._in_thread(setattr, self._session, "system", system)
            options = reply_options(self._connection, config)
            await self._in_thread(self._session.set_options, **options)
        except BaseException:
            self._account.release(size)
            raise
        self._account.release(self._config_bytes)
        self._config_bytes = size

    def _detect(self) -> None:
        detection = self._config.audio.input.turn_detection
        self._input.detect(None if detection is None else detection.turns)

    # The user's turns.

    async def _react_to(self, found: Sequence[TurnEvent]) -> None:
        """Handle all events of the turn detector; raise the first error."""
        left, failure = deque(found), None
        while left:
            try:
                left.extend(await self._react(left.popleft()))
            except events.ClientGoneError:
                raise
            except Exception as error:
                failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # breaks its reference cycle with this frame

    async def _react(self, event: TurnEvent) -> Sequence[TurnEvent]:
        """Handle one event. Returns the turn detector's next events."""
        detection = self._config.audio.input.turn_detection
        if detection is None:
            return ()
        answers = detection.create_response and self._config.answers
        if isinstance(event, Speech):
            await self._in_thread(self._input.append, event.samples)
        elif isinstance(event, Paused):
            return await self._pause(event.heard, answers)
        elif isinstance(event, Started):
            if detection.interrupt_response:
                self._responses.abandon("turn_detected")
            start = {"audio_start_ms": _ms(event.at), "item_id": self._input.item_id}
            await self._send("input_audio_buffer.speech_started", **start)
            if detection.interrupt_response:
                await self._responses.interrupt("turn_detected")
        elif isinstance(event, TimedOut):
            times = {"audio_start_ms": _ms(event.start), "audio_end_ms": _ms(event.end)}
            await self._end_turn("timeout_triggered", times, self._config.answers)
        else:
            await self._end_turn("speech_stopped", {"audio_end_ms": _ms(event.at)}, answers)
        return ()

    async def _pause(self, heard: Samples | None, answers: bool) -> Sequence[TurnEvent]:
        """Prefill ahead, and meanwhile judge whether the turn is complete.

        heard: see `Paused`. Returns the turn detector's next events.
        """
        judging = None
        if heard is not None:
            judge = self._service.readers.run(
                self._connection.context.owner, turn_detector.is_complete, heard
            )
            judging = asyncio.create_task(judge)
        if answers:
            await self._in_thread(self._session.prepare, speaks(self._config))
        if judging is None:
            return ()
        return await self._in_thread(self._input.judged, await judging)

    async def _end_turn(self, kind: str, times: dict[str, int], answers: bool) -> None:
        """Commit the user's turn, and answer it. kind, times: of the event for the client."""
        await self._send(f"input_audio_buffer.{kind}", **times, item_id=self._input.item_id)
        try:
            turn, transcript = await self._input.commit(flush=False)
            try:
                if answers:
                    await self._responses.start(self._config, response_config(None, self._voices))
            finally:  # after the answer has started
                if transcript is not None:
                    self._transcriber.finish(transcript, turn)
        except (ApiError, Qwen3OmniError) as error:
            await self._connection.send_error(self._connection.failed(error))


def _ms(samples: int) -> int:
    return samples * 1000 // TURN_RATE
