"""One realtime session: client events in, server events out, until client or server ends it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from starlette.types import Receive, Send

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.errors import AudioError, InputError, Qwen3OmniError
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.bodies import bounded_options
from qwen3_omni_neuron.serving.context import Context
from qwen3_omni_neuron.serving.errors import ApiError, api_error_of
from qwen3_omni_neuron.serving.ids import new_id
from qwen3_omni_neuron.serving.media import MediaReader
from qwen3_omni_neuron.serving.realtime import events, vad
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    Codec,
    Resampler,
    Samples,
    codec_of,
    decoded_sound,
)
from qwen3_omni_neuron.serving.realtime.conversation import RATE, Conversation, Draft, Entry
from qwen3_omni_neuron.serving.realtime.events import Json
from qwen3_omni_neuron.serving.realtime.response import Asked, CancelReason, Line, Response
from qwen3_omni_neuron.serving.realtime.session_config import (
    ResponseConfig,
    SessionConfig,
    SoundFormat,
    Voices,
    first_config,
    options_of,
    response_config,
    shown,
    speaks,
    updated,
)
from qwen3_omni_neuron.serving.realtime.transcribing import Transcriber
from qwen3_omni_neuron.serving.realtime.turns import (
    Outcome,
    Paused,
    Speech,
    Started,
    Stopped,
    TimedOut,
    TurnDetector,
)
from qwen3_omni_neuron.serving.service import Service
from qwen3_omni_neuron.session import Reply, ReplyStream, Turn

TOO_LONG, RESTART = 1000, 1012  # WebSocket close codes
_TICK_S = 0.1
_CONFIG_COPIES = 4  # copies of a configuration's JSON: objects, and those of options and turn


class LiveSession:
    """One session, from its first event to its end."""

    def __init__(
        self,
        service: Service,
        context: Context,
        omni: Qwen3Omni,
        pool: ThreadPoolExecutor,
        receive: Receive,
        send: Send,
    ):
        self._service, self._context, self._pool, self._omni = service, context, pool, omni
        self._receive = receive
        self._voices = Voices(omni.info.speakers)
        session = omni.session(literal_text=True)
        self._account = service.account_of_session(context.owner)
        self._conversation = Conversation(session, self._account)
        self._config = first_config(service.model.name, self._voices)
        self._config_bytes = 0  # bytes of the configuration in the account
        self._id = new_id("sess_")
        self._expires_s = time.monotonic() + service.settings.max_realtime_s
        self._expires_at = int(time.time() + service.settings.max_realtime_s)
        self._line = Line(send, pool, self._conversation, service, context)
        self._send, self._in_thread = self._line.send, self._line.in_thread
        self._response: Response | None = None  # the last response
        self._held = ExitStack()  # resources of the last response until its end: place, own input
        self._spoken: Response | None = None  # the last response with sound, which may still play
        self._transcriber = Transcriber(self._line, self._account)
        self._detector: TurnDetector | None = None
        self._codec = _codec(self._config.audio.input.format)
        self._resampler = Resampler(self._codec.rate, RATE)
        self._item_id = new_id("item_")  # id for the item of the user's current turn
        self._draining = False

    async def serve(self) -> None:
        """Serve until the client leaves, the session's time is over, or the server ends."""
        tasks = [asyncio.create_task(step) for step in (self._read(), self._watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._pool.submit(self._conversation.session.close)
            self._held.close()
            self._account.close()
            self._transcriber.close()
            if self._response is not None:
                await self._response.end()
            self._response = self._spoken = None  # breaks their reference cycles with the session
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                if not isinstance(error, events.ClientGoneError):
                    raise error
                self._context.error = "client_left"

    async def _read(self) -> None:
        """Answer the client's events one after the other."""
        await self._send("session.created", session=self._shown())
        await self._in_thread(self._conversation.session.set_options, **self._options())
        await self._in_thread(self._detect)
        while (message := await self._receive())["type"] != "websocket.disconnect":
            text = message.get("text")
            event_id = None
            try:
                if text is None:
                    refusal = "events are sent as text, not as bytes."
                    raise events.EventError(ApiError(400, refusal, "invalid_json"), None)
                small = len(text) < 1 << 16
                event = (
                    events.read_event(text)
                    if small
                    else await self._in_thread(events.read_event, text)
                )
                event_id = event.event_id
                del message, text
                await _HANDLERS[type(event)](self, event)
            except events.EventError as error:
                await self._send("error", **events.error_of(error.error, error.event_id))
            except events.ClientGoneError:
                raise
            except Exception as error:
                await self._send("error", **events.error_of(self._failed(error), event_id))

    def _failed(self, error: Exception) -> ApiError:
        """Return the client's error for an exception, and log internal errors."""
        self._service.model.noticed(error)
        refusal = api_error_of(error)
        if refusal.code == "internal_error":
            extra = {"request_id": self._context.request_id}
            logs.logger.error("failed", exc_info=error, extra=extra)
        return refusal

    async def _watch(self) -> None:
        """End the session, after an announcement, when its time or the server's is over."""
        while time.monotonic() < self._expires_s:
            await asyncio.sleep(_TICK_S)
            left_s = self._service.model.sessions_end_in_s
            if left_s is None:
                continue
            if not self._draining:
                self._draining = True
                message = (
                    "the server ends: this session is closed as soon as no response is made, in "
                    f"{left_s:.0f} s at the latest. Open another one."
                )
                failed = self._service.model.state == "failed"
                error = ApiError(503, message, "server_failed" if failed else "server_draining")
                await self._send("error", **events.error_of(error, None))
            if not left_s or self._response is None or not self._response.running:
                return await self._close(RESTART, "the server ends")
        seconds = self._service.settings.max_realtime_s
        message = f"the session has lasted {seconds:g} s, the most for one. Begin another."
        error = ApiError(400, message, "session_expired")
        await self._send("error", **events.error_of(error, None))
        return await self._close(TOO_LONG, "session_expired")

    async def _close(self, code: int, reason: str) -> None:
        with suppress(OSError):
            await self._line.raw_send({"type": "websocket.close", "code": code, "reason": reason})

    # The session.

    def _shown(self) -> Json:
        made = {"id": self._id, "object": "realtime.session", "expires_at": self._expires_at}
        return {**made, **shown(self._config)}

    async def _update(self, event: events.SessionUpdate) -> None:
        before, session = self._config, self._conversation.session
        config = await self._in_thread(updated, before, event.session, self._voices)
        size = _CONFIG_COPIES * len(await self._in_thread(config.model_dump_json))
        self._account.hold(size)
        try:
            if config.instructions != before.instructions:
                await self._in_thread(setattr, session, "system", config.instructions or None)
            await self._in_thread(session.set_options, **self._options(config))
        except BaseException:
            self._account.release(size)
            raise
        self._account.release(self._config_bytes)
        self._config_bytes = size
        self._config = config
        if config.audio.input.format != before.audio.input.format:
            await self._hear_rest()
            self._codec = _codec(config.audio.input.format)
            self._resampler = Resampler(self._codec.rate, RATE)
        if config.audio.input.turn_detection != before.audio.input.turn_detection:
            await self._in_thread(self._detect)
        await self._send("session.updated", session=await self._in_thread(self._shown))

    def _options(self, *asked: SessionConfig | ResponseConfig) -> dict[str, Any]:
        """Return the options of replies. asked: configurations; none: that of the session."""
        options = options_of(*(asked or (self._config,))) | {"literal_text": True}
        return bounded_options(options, self._service.settings, self._context.owner)

    def _detect(self) -> None:
        detection, at = self._config.audio.input.turn_detection, 0
        if self._detector is not None:
            at = self._detector.at
        if detection is None:
            self._detector = None
        else:
            self._detector = TurnDetector(detection.turns, vad.SileroVad(), at=at)

    # The user's sound.

    async def _append(self, event: events.Append) -> None:
        outcomes = await self._in_thread(self._heard, event.audio)
        for outcome in outcomes:
            await self._turn(outcome)

    def _heard(self, text: str) -> list[Outcome]:
        """Process sound, in the session's thread. Returns the outcomes to report."""
        samples = self._resampler.push(decoded_sound(text, self._codec, "audio"))
        if self._detector is None:
            if len(samples):
                self._conversation.hear(samples)
            return []
        outcomes = self._detector.push(samples)
        for number, outcome in enumerate(outcomes):
            if not isinstance(outcome, Speech):
                return outcomes[number:]
            self._conversation.hear(outcome.samples)
        return []

    async def _hear_rest(self) -> None:
        """Process the resampler's last samples."""

        def hear(rest: Samples) -> None:
            if self._detector is not None:
                rest = self._detector.end_turn()
            if len(rest):
                self._conversation.hear(rest)

        await self._in_thread(hear, self._resampler.finish())

    async def _turn(self, outcome: Outcome) -> None:
        detection = self._config.audio.input.turn_detection
        if detection is None or self._detector is None:
            return
        if isinstance(outcome, Speech):
            await self._in_thread(self._conversation.hear, outcome.samples)
        elif isinstance(outcome, Paused):
            if detection.create_response:
                prepare = self._conversation.session.prepare
                await self._in_thread(prepare, speaks(self._config))
        elif isinstance(outcome, Started):
            if detection.interrupt_response and self._response is not None:
                self._response.abandon("turn_detected")
            start = {"audio_start_ms": _ms(outcome.at), "item_id": self._item_id}
            await self._send("input_audio_buffer.speech_started", **start)
            if detection.interrupt_response:
                await self._interrupt("turn_detected")
        else:
            await self._turn_ended(outcome, detection.create_response)

    async def _turn_ended(self, outcome: Stopped | TimedOut, create_response: bool) -> None:
        if isinstance(outcome, TimedOut):
            times = {"audio_start_ms": _ms(outcome.start), "audio_end_ms": _ms(outcome.end)}
            kind, create_response = "timeout_triggered", True
        else:
            times, kind = {"audio_end_ms": _ms(outcome.at)}, "speech_stopped"
        await self._send(f"input_audio_buffer.{kind}", **times, item_id=self._item_id)
        try:
            entry = await self._committed()
            if create_response:
                await self._respond(response_config(None, self._voices))
            await self._transcribe(entry)
        except (ApiError, Qwen3OmniError) as error:
            await self._send("error", **events.error_of(self._failed(error), None))

    async def _commit(self, _: events.Commit) -> None:
        await self._hear_rest()
        await self._transcribe(await self._committed())

    async def _committed(self) -> Entry:
        try:
            entry, before = await self._in_thread(self._conversation.commit, self._item_id)
        except AudioError as error:
            code = "input_audio_buffer_commit_empty"
            raise ApiError(400, f"the input audio buffer: {error}", code) from error
        self._item_id = new_id("item_")
        await self._send("input_audio_buffer.committed", item_id=entry.id, previous_item_id=before)
        await self._told(entry, before)
        return entry

    async def _transcribe(self, entry: Entry) -> None:
        """Start a turn's transcription, if requested, after its answer has started."""
        if self._config.audio.input.transcription is not None:
            samples = await self._in_thread(self._conversation.samples_of, entry)
            self._transcriber.add(entry, samples)

    async def _clear(self, _: events.Clear) -> None:
        self._resampler.finish()
        if self._detector is not None:
            self._detector.end_turn()
        await self._in_thread(self._conversation.drop)
        await self._send("input_audio_buffer.cleared")

    # The conversation.

    async def _told(self, entry: Entry, before: str | None) -> None:
        for kind in ("added", "done"):
            await self._send(f"conversation.item.{kind}", item=entry.json, previous_item_id=before)

    async def _create(self, event: events.ItemCreate) -> None:
        draft = await self._draft(event.item)
        try:
            create = self._conversation.create
            entry, before = await self._in_thread(create, draft, event.previous_item_id)
        except BaseException:
            draft.drop()
            raise
        await self._told(entry, before)

    async def _draft(self, item: events.Item) -> Draft:
        """Read a client's item with its media. Raises ApiError and the API's errors."""
        media = self._media()
        draft = await self._in_thread(self._conversation.draft, item, media, self._codec)
        try:
            await media.finish(draft.hold)
        except BaseException:
            draft.drop()
            raise
        return draft

    async def _retrieve(self, event: events.ItemRetrieve) -> None:
        item = await self._in_thread(self._conversation.retrieve, event.item_id, self._codec)
        await self._send("conversation.item.retrieved", item=item)

    async def _delete(self, event: events.ItemDelete) -> None:
        await self._in_thread(self._conversation.delete, event.item_id)
        await self._send("conversation.item.deleted", item_id=event.item_id)

    async def _truncate(self, event: events.ItemTruncate) -> None:
        await self._cut(event.item_id, event.content_index, event.audio_end_ms)

    async def _cut(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        cut = self._conversation.truncate
        await self._in_thread(cut, item_id, content_index, audio_end_ms)
        fields = {"content_index": content_index, "audio_end_ms": audio_end_ms}
        await self._send("conversation.item.truncated", item_id=item_id, **fields)

    # Responses.

    async def _respond_to(self, event: events.ResponseCreate) -> None:
        await self._respond(response_config(event.response, self._voices))

    async def _respond(self, asked: ResponseConfig) -> None:
        if self._response is not None and self._response.running:
            raise ApiError(
                400,
                f"response {self._response.id} is still being made. Wait for response.done, or "
                "send response.cancel.",
                "conversation_already_has_active_response",
            )
        if self._draining:
            refusal = "the server ends: no response is made any more. Open another session."
            raise ApiError(503, refusal, "server_draining")
        self._service.rates.count(self._context.owner)
        spoken = speaks(asked if asked.output_modalities else self._config)
        self._voices.check(None, spoken, "session")
        options = self._options(self._config, asked)
        takes_calls = bool(options.get("tools"))
        with ExitStack() as held:
            held.enter_context(self._service.requests.place(self._context.owner))
            given = await self._input(asked, held)
            response = Response(self._asked(asked, spoken, takes_calls), self._line, self._answered)
            self._response = response
            try:
                stream, message, before = await self._started(
                    partial(self._begin, asked, given, spoken, options)
                )
            except InputError as error:
                raise api_error_of(error) from error
            except Qwen3OmniError as error:
                self._service.model.noticed(error)
                return await response.refuse(api_error_of(error))
            self._held = held.pop_all()
        if spoken:
            self._spoken = response
        response.begin(stream, message, before)
        return None

    async def _input(
        self, asked: ResponseConfig, held: ExitStack
    ) -> list[Draft | events.Reference] | None:
        """Read a response's own input, None if it has none. held: stack for its resources."""
        if asked.input is None:
            return None
        given: list[Draft | events.Reference] = []
        for item in await self._in_thread(events.read_items, asked.input):
            if isinstance(item, events.Reference):
                given.append(item)
            else:
                given.append(draft := await self._draft(item))
                held.callback(draft.drop)
        return given

    def _begin(
        self,
        asked: ResponseConfig,
        given: list[Draft | events.Reference] | None,
        spoken: bool,
        options: dict[str, Any],
    ) -> tuple[ReplyStream, Entry | None, str | None]:
        """Start a reply, in the session's thread."""
        conversation, session = self._conversation, self._conversation.session
        turns: list[Turn | Reply] = session.turns
        if given is not None:
            turns = conversation.input_of(given)
        kept = asked.conversation == "auto"
        system = self._config.instructions if asked.instructions is None else asked.instructions
        stream = session.respond(
            spoken,
            turns=conversation.answerable(turns),
            system=system or None,
            keep=kept,
            **options,
        )
        if not kept:
            return stream, None, None
        return stream, *conversation.begin_reply(stream.reply, spoken)

    async def _started(
        self, call: Callable[[], tuple[ReplyStream, Entry | None, str | None]]
    ) -> tuple[ReplyStream, Entry | None, str | None]:
        """Start a reply in the session's thread. Cancelling the task cancels the reply, too."""
        future = self._pool.submit(call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_close_started)
            raise

    def _asked(self, asked: ResponseConfig, spoken: bool, takes_calls: bool) -> Asked:
        output = self._config.audio.output
        form = asked.audio.output.format or output.format
        voice = asked.audio.output.voice or output.voice
        sound = {"format": form.model_dump(exclude_none=True), "voice": voice}
        most = asked.max_output_tokens or self._config.max_output_tokens
        fields = {
            "output_modalities": ["audio" if spoken else "text"],
            "max_output_tokens": most,
            "audio": {"output": sound},
            "metadata": asked.metadata,
        }
        return Asked(spoken, asked.conversation == "auto", _codec(form), takes_calls, fields)

    async def _cancel(self, event: events.ResponseCancel) -> None:
        response = self._response
        if response is None or not response.running or event.response_id not in (None, response.id):
            raise ApiError(
                400,
                "there is no such response that is being made.",
                "response_cancel_not_active",
                "response_id",
            )
        await self._interrupt("client_cancelled")

    async def _clear_output(self, _: events.ClearOutput) -> None:
        response = self._response
        await self._interrupt("client_cancelled")
        if response is not None:
            await self._send("output_audio_buffer.cleared", response_id=response.id)

    async def _interrupt(self, reason: CancelReason) -> None:
        """Cancel the response, and truncate the item that plays to what was played so far."""
        spoken, heard_s, left_s = self._spoken, 0.0, 0.0
        if spoken is not None:
            heard_s, left_s = spoken.playback.heard_s, spoken.playback.left_s
        if self._response is not None and self._response.running:
            await self._response.stop(reason)
        entry = None if spoken is None else spoken.message
        if left_s and entry is not None and entry.audio_s:
            self._spoken = None
            try:
                await self._cut(entry.id, 0, int(heard_s * 1000))
            except ApiError:  # the client has deleted the item
                logs.logger.debug("nothing to cut", exc_info=True)

    def _answered(self) -> None:
        self._held.close()
        if self._detector is not None:
            self._detector.wait(self._spoken.playback.left_s if self._spoken else 0.0)

    def _media(self) -> MediaReader:
        return MediaReader(self._service, self._omni, self._context.owner)


_HANDLERS: dict[type, Callable[[LiveSession, Any], Awaitable[None]]] = {
    events.SessionUpdate: LiveSession._update,
    events.Append: LiveSession._append,
    events.Commit: LiveSession._commit,
    events.Clear: LiveSession._clear,
    events.ClearOutput: LiveSession._clear_output,
    events.ItemCreate: LiveSession._create,
    events.ItemRetrieve: LiveSession._retrieve,
    events.ItemDelete: LiveSession._delete,
    events.ItemTruncate: LiveSession._truncate,
    events.ResponseCreate: LiveSession._respond_to,
    events.ResponseCancel: LiveSession._cancel,
}


def _codec(form: SoundFormat) -> Codec:
    return codec_of(form.type, form.rate)


def _ms(samples: int) -> int:
    return samples * 1000 // RATE


def _close_started(future: "Future[tuple[ReplyStream, Entry | None, str | None]]") -> None:
    if not future.cancelled() and future.exception() is None:
        future.result()[0].close()
