"""One response: a reply's events as OpenAI events."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any, Literal, TypeVar

from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk, SpeechResult, TextDelta
from qwen3_omni_neuron.prompt.turns import Reply
from qwen3_omni_neuron.runtime.schedule import Playback
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.endpoints.answer import ServedStream
from qwen3_omni_neuron.serving.endpoints.sound import Tempo
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.reply import (
    Call,
    Content,
    ReplyPart,
    ReplyText,
    new_id,
    realtime_usage,
)
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    Resampler,
    Samples,
    codec_of,
    encoded_sound,
)
from qwen3_omni_neuron.serving.realtime.events import CallItem, ClientGoneError, Connection, Json
from qwen3_omni_neuron.serving.realtime.items import (
    ConversationItems,
    draft_of,
    new_item,
    reply_part,
)
from qwen3_omni_neuron.serving.realtime.session_config import ResponseConfig, SessionConfig
from qwen3_omni_neuron.session import ReplyStream

CancelReason = Literal["turn_detected", "client_cancelled"]
Result = TypeVar("Result")


class Response:
    """One response. `begin` sends its events; `abandon` cancels it.

    message: its reply in the conversation, or None.
    """

    def __init__(
        self,
        config: SessionConfig,
        overrides: ResponseConfig,
        spoken: bool,
        takes_calls: bool,
        connection: Connection,
        items: ConversationItems,
        on_done: Callable[[], None],
    ):
        """on_done: called before its last event."""
        self.id = new_id("resp_")
        self.message: Reply | None = None
        self._connection, self._items, self._on_done = connection, items, on_done
        output, own = config.audio.output, overrides.audio.output
        form = own.format or output.format
        sound = {"format": form.model_dump(exclude_none=True), "voice": own.voice or output.voice}
        self._shown: Json = {
            "output_modalities": ["audio" if spoken else "text"],
            "max_output_tokens": overrides.max_output_tokens or config.max_output_tokens,
            "audio": {"output": sound},
            "metadata": overrides.metadata,
        }
        self._spoken, self._speed = spoken, output.speed
        self._in_history = overrides.conversation == "auto"
        self._codec = codec_of(form.type, form.rate)
        self._served: ServedStream  # set by `begin`, as is its playback
        self.playback: Playback
        # Ids of its items in the conversation, after the previous item's.
        self._kept: list[str | None] = [None]
        self._reason: CancelReason | None = None
        thinks = connection.service.model.take().info.thinks
        self._split = ReplyText(thinks, takes_calls)
        self._text_field = "transcript" if spoken else "text"
        self._output: list[Json] = []  # its items as clients see them, up to the one being sent
        self._open = False  # True while the last item is an unfinished message
        self._calls = 0
        self._dropped = False  # True if a message lacks some text
        self._settled = False
        changed = spoken and self._speed != 1
        self._tempo = Tempo(self._speed) if changed else None
        self._resampler = Resampler(SAMPLE_RATE, self._codec.rate)
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """True until response.done was sent."""
        return self._task is not None and not self._task.done()

    def begin(self, stream: ReplyStream, before: str | None) -> None:
        """Start to send its events. before: id of the item before the reply, if any."""
        self._served = ServedStream(stream, self._connection.service, speed=self._speed)
        self.playback = self._served.playback
        if self._in_history:
            self.message, self._kept = stream.reply, [before, stream.reply.id]
        self._task = asyncio.create_task(self._run())

    async def refuse(self, error: ApiError) -> None:
        """Send the events of a response that failed before it began."""
        await self._created()
        await self._done(None, error)

    async def ended(self) -> None:
        """Wait until its last event was sent."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def abandon(self, reason: CancelReason = "client_cancelled") -> None:
        """Cancel the response: generation stops, and its last events follow."""
        if self._reason is None and self.running:
            self._reason = reason
            self._served.close()

    async def end(self) -> None:
        """End the response of a client that has left."""
        self.abandon()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None  # breaks the reference cycle through its error
        if self.message is not None and self.message.shown["status"] == "in_progress":
            self.message.shown["status"] = "incomplete"
        await self._settle()

    async def _run(self) -> None:
        """Send its events, ending with response.done even after an error."""
        try:
            result, error = await self._attempt(self._read())
            whole = self._reason is None and error is None
            _, failure = await self._attempt(self._end_items(whole))
            error = error or failure
            _, failure = await self._attempt(self._done(result if whole else None, error))
            if failure is not None:
                await self._done(None, failure)
        except ClientGoneError:
            pass  # the session's reader notices it

    async def _attempt(
        self, part: Coroutine[Any, Any, Result]
    ) -> tuple[Result | None, ApiError | None]:
        try:
            return await part, None
        except ClientGoneError:
            raise
        except Exception as failure:
            return None, self._connection.failed(failure)

    async def _read(self) -> SpeechResult | None:
        result: SpeechResult | None = None
        with closing(self._served) as served:
            await self._created()
            async for (event,) in served:
                if self._reason is not None:
                    break
                if isinstance(event, TextDelta):
                    await self._take(self._split.push(event.text))
                elif isinstance(event, AudioChunk):
                    await self._sound(event)
                else:
                    result = event.result
                    at_limit = result.thinker_finish_reason == "length"
                    await self._take(self._split.finish(at_limit=at_limit))
        return result

    async def _end_items(self, whole: bool) -> None:
        await self._close("completed" if whole else "incomplete")
        await self._settle()

    async def _take(self, parts: list[ReplyPart]) -> None:
        for part in parts:
            if isinstance(part, Content):
                await self._text(part.text)
            elif isinstance(part, Call):
                await self._close()
                await self._call(part)
            else:
                self._dropped = True

    async def _text(self, text: str) -> None:
        if not self._open:
            await self._open_message()
        self._output[-1]["content"][0][self._text_field] += text
        kind = "output_audio_transcript" if self._spoken else "output_text"
        await self._send_of(f"{kind}.delta", delta=text)

    async def _sound(self, chunk: AudioChunk) -> None:
        if self._calls:
            return
        if not self._open:
            await self._open_message()
        await self._send_sound(self._tempo.push(chunk.samples) if self._tempo else chunk.samples)

    async def _send_sound(self, samples: Samples) -> None:
        await self._send_coded(self._resampler.push(samples))
        if self.message is not None:
            self.message.sent_s += len(samples) / SAMPLE_RATE

    async def _send_coded(self, samples: Samples) -> None:
        if len(samples):
            sound = encoded_sound(samples, self._codec)
            await self._send_of("output_audio.delta", delta=sound)

    async def _open_message(self) -> None:
        # Text after a call is in no item.
        message_id = self.message.id if self.message is not None and not self._output else None
        item = new_item("message", message_id, role="assistant", status="in_progress")
        item["content"] = [reply_part(self._spoken, "")]
        self._output.append(item)
        self._open = True
        await self._announce(item | {"content": []}, self._kept[0])
        await self._send_of("content_part.added", part=self._part)

    async def _close(self, status: str = "completed") -> None:
        if not self._open:
            return
        self._open, item = False, self._output[-1]
        text = {self._text_field: item["content"][0][self._text_field]}
        if self._spoken:
            if status == "completed":
                if self._tempo is not None:
                    await self._send_sound(self._tempo.finish())
                await self._send_coded(self._resampler.finish())
            self._tempo = None
            await self._send_of("output_audio.done")
            await self._send_of("output_audio_transcript.done", **text)
        else:
            await self._send_of("output_text.done", **text)
        await self._send_of("content_part.done", part=self._part)
        item["status"] = status
        if self.message is not None and len(self._output) == 1:
            self.message.shown["status"] = status
        await self._finish(self._kept[0])

    @property
    def _part(self) -> Json:
        kind = "audio" if self._spoken else "text"
        return {**self._output[-1]["content"][0], "type": kind}

    async def _call(self, call: Call) -> None:
        self._calls += 1
        self._served.muted = True  # calls are not spoken
        function = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        draft, before = draft_of(CallItem(type="function_call", **function)), None
        if not call.complete:
            draft.shown["status"] = "incomplete"
        if self.message is not None:
            add_call = self._items.add_call
            before = await self._connection.in_thread(add_call, draft, self._kept)
            self._kept.append(draft.id)
        if not self._output:
            before = self._kept[0]
        self._output.append(draft.shown)
        begun = draft.shown | {"status": "in_progress", "arguments": ""}
        await self._announce(begun, before)
        kind = "response.function_call_arguments"
        await self._send_item(f"{kind}.delta", delta=call.arguments, call_id=call.id)
        await self._send_item(f"{kind}.done", **function)
        await self._finish(before)

    async def _announce(self, item: Json, before: str | None) -> None:
        """Send the events of an item that begins. before: id of the previous item."""
        await self._send_item("response.output_item.added", item=item)
        await self._in_conversation("added", item, before)

    async def _finish(self, before: str | None) -> None:
        """Send the events of the item that ends. before: id of the previous item."""
        await self._in_conversation("done", self._output[-1], before)
        await self._send_item("response.output_item.done", item=self._output[-1])

    async def _in_conversation(self, kind: str, item: Json, before: str | None) -> None:
        if item["id"] in self._kept:
            fields = {"item": item, "previous_item_id": before}
            await self._connection.send(f"conversation.item.{kind}", **fields)

    async def _settle(self) -> None:
        """Make the conversation's item match the text sent to clients."""
        if self.message is not None:
            await self._connection.in_thread(self._settle_once, self.message)

    def _settle_once(self, message: Reply) -> None:
        """Settle the reply's item; `end` repeats it if the waiting task is cancelled."""
        if self._settled:
            return
        self._settled = True
        if self._output and self._output[0]["id"] == message.id:
            text = self._output[0]["content"][0][self._text_field]
            self._items.settle(message, text, not self._calls and not self._dropped)
        else:
            self._items.forget(message)

    async def _created(self) -> None:
        await self._connection.send("response.created", response=self._json("in_progress"))
        rates = self._connection.service.rates.left(self._connection.context.owner)
        await self._connection.send("rate_limits.updated", rate_limits=rates)

    async def _done(self, result: SpeechResult | None, error: ApiError | None) -> None:
        made, details = self._json("completed"), None
        if error is not None:
            shown = {name: error.body["error"][name] for name in ("type", "code", "message")}
            details = {"type": "failed", "error": shown}
        elif self._reason is not None:
            details = {"type": "cancelled", "reason": self._reason}
        elif result is not None:
            if "length" in (result.thinker_finish_reason, result.talker_finish_reason):
                details = {"type": "incomplete", "reason": "max_output_tokens"}
            made["usage"] = realtime_usage(result.timings)
        if details is not None:
            made |= {"status": details["type"], "status_details": details}
        self._log(result, made["status"], error)
        self._on_done()
        await self._connection.send("response.done", response=made)

    def _log(self, result: SpeechResult | None, status: str, error: ApiError | None) -> None:
        session = self._connection.context
        context = Context(self.id, "RESPONSE", session.path, session.owner)
        context.error = None if error is None else error.code
        if result is not None:
            context.finished(result)
            if self._connection.service.settings.log_content:
                context.answer = result.text
        fields = context.log_fields() | {"status": status, "method": None, "seconds": None}
        logs.event("response", session=session.request_id, **fields)

    def _json(self, status: str) -> Json:
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": None,
            "output": self._output,
            "conversation_id": self._items.id if self._in_history else None,
            "usage": None,
            **self._shown,
        }

    async def _send_item(self, kind: str, **fields: Any) -> None:
        if "item" not in fields:
            fields["item_id"] = self._output[-1]["id"]
        index = len(self._output) - 1
        await self._connection.send(kind, response_id=self.id, output_index=index, **fields)

    async def _send_of(self, kind: str, **fields: Any) -> None:
        await self._send_item(f"response.{kind}", content_index=0, **fields)
