"""One response: converts a reply's events to OpenAI's events, in their order."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk, SpeechResult, TextDelta
from qwen3_omni_neuron.runtime.playback import Playback
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.endpoints.served_stream import ServedStream
from qwen3_omni_neuron.serving.endpoints.sound import Tempo
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.ids import new_id
from qwen3_omni_neuron.serving.openai.reply_text import Call, Content, ReplyPart, ReplyText
from qwen3_omni_neuron.serving.openai.usage import realtime_usage
from qwen3_omni_neuron.serving.realtime.audio_codecs import (
    Codec,
    Resampler,
    Samples,
    encoded_sound,
)
from qwen3_omni_neuron.serving.realtime.connection import Connection
from qwen3_omni_neuron.serving.realtime.events import ClientGoneError, Json
from qwen3_omni_neuron.serving.realtime.items import ConversationItem, ConversationItems
from qwen3_omni_neuron.session import ReplyStream

CancelReason = Literal["turn_detected", "client_cancelled"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class ResponseSettings:
    """Properties of a response that are known before it begins.

    spoken: its content is sound. kept: it is added to the conversation. codec: format of its sound.
    speed: factor by which its sound is faster than it was made. takes_calls: it may call tools.
    shown: fields of the response that clients get.
    """

    spoken: bool
    kept: bool
    codec: Codec
    speed: float
    takes_calls: bool
    shown: Json


class Response:
    """One response. `begin` sends its events; `stop` ends it.

    message: its first item, which has the text. playback: estimated playback of its sound.
    """

    def __init__(
        self,
        settings: ResponseSettings,
        connection: Connection,
        items: ConversationItems,
        on_done: Callable[[], None],
    ):
        """on_done: called before its last event."""
        self.id = new_id("resp_")
        self.message: ConversationItem | None = None
        self._settings, self._connection, self._items = settings, connection, items
        self._on_done = on_done
        self._served: ServedStream  # set by `begin`, as is its playback
        self.playback: Playback
        self._before: str | None = None  # id of the item before the message
        self._reason: CancelReason | None = None
        thinks = connection.service.model.take().info.thinks
        self._split = ReplyText(thinks, settings.takes_calls)
        self._output: list[_OutputItem] = []
        self._open: _OutputItem | None = None
        self._calls = 0
        self._dropped = False  # True if some of the reply's text is in no message
        self._settled = False
        changed = settings.spoken and settings.speed != 1
        self._tempo = Tempo(settings.speed, SAMPLE_RATE) if changed else None
        self._resampler = Resampler(SAMPLE_RATE, settings.codec.rate)
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """True until response.done was sent."""
        return self._task is not None and not self._task.done()

    def begin(
        self, stream: ReplyStream, message: ConversationItem | None, before: str | None
    ) -> None:
        """Start to send its events. message: its item; None if the reply is not kept."""
        service, speed = self._connection.service, self._settings.speed
        self._served = ServedStream(stream, service, speed=speed)
        self.playback = self._served.playback
        self.message, self._before = message, before
        self._task = asyncio.create_task(self._run())

    async def refuse(self, error: ApiError) -> None:
        """Send the events of a response that failed before it began."""
        await self._created()
        await self._done(None, error)

    async def stop(self, reason: CancelReason) -> None:
        """Cancel the response and wait until its last event was sent."""
        self.abandon(reason)
        if self._task is not None:
            await asyncio.wait((self._task,))

    def abandon(self, reason: CancelReason = "client_cancelled") -> None:
        """Cancel the response at once: its generation stops."""
        if self._reason is None and self.running:
            self._reason = reason
            self._served.close()

    async def end(self) -> None:
        """End the response of a client that has left; its item stays as far as it was sent."""
        self.abandon()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None  # breaks the reference cycle through its error
        if self.message is not None and self.message.status == "in_progress":
            self.message.status = "incomplete"
        await self._settle()

    async def _run(self) -> None:
        """Send its events. The last one is response.done, even after an error."""
        try:
            result, error = await self._attempt(self._read())
            whole = self._reason is None and error is None
            _, failure = await self._attempt(self._end_items(whole))
            error = error or failure
            _, failure = await self._attempt(self._done(result if whole else None, error))
            if failure is not None:
                await self._done(None, failure)
        except ClientGoneError:
            pass  # the session's reader notices it, too

    async def _attempt(
        self, part: Coroutine[Any, Any, Result]
    ) -> tuple[Result | None, ApiError | None]:
        """Run a part of it. Returns the result, and the client's error if it has failed."""
        try:
            return await part, None
        except ClientGoneError:
            raise
        except Exception as failure:
            return None, self._connection.failed(failure)

    async def _read(self) -> SpeechResult | None:
        """Send the stream's events, to its end or until the response is cancelled."""
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
                    await self._take(self._split.finish())
                    result = event.result
        return result

    async def _end_items(self, whole: bool) -> None:
        """End the items that were begun. whole: the reply was completed."""
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
        out = self._open or await self._open_message()
        out.text += text
        kind = "output_audio_transcript" if self._settings.spoken else "output_text"
        await self._send_of(f"{kind}.delta", out, delta=text)

    async def _sound(self, chunk: AudioChunk) -> None:
        if self._calls:
            return
        out = self._open or await self._open_message()
        samples = chunk.samples
        await self._send_sound(out, self._tempo.push(samples) if self._tempo else samples)

    async def _send_sound(self, out: "_OutputItem", samples: Samples) -> None:
        """Send samples that are to be played next, at the model's rate."""
        coded = self._resampler.push(samples)
        if len(coded):
            delta = encoded_sound(coded, self._settings.codec)
            await self._send_of("output_audio.delta", out, delta=delta)
        if out.item is not None:
            out.item.audio_s += len(samples) / SAMPLE_RATE

    async def _open_message(self) -> "_OutputItem":
        out = self._open = self._add_output(self.message if not self._output else None)
        await self._announce(out, out.json(self._settings.spoken, "in_progress"), self._before)
        part = out.part(self._settings.spoken, empty=True)
        await self._send_of("content_part.added", out, part=part)
        return out

    async def _close(self, status: str = "completed") -> None:
        """End the open message."""
        out, self._open = self._open, None
        if out is None:
            return
        if self._settings.spoken:
            tempo, self._tempo = self._tempo, None
            if tempo is not None and status == "completed":
                await self._send_sound(out, tempo.finish())
            rest = self._resampler.finish()
            if len(rest) and status == "completed":
                delta = encoded_sound(rest, self._settings.codec)
                await self._send_of("output_audio.delta", out, delta=delta)
            await self._send_of("output_audio.done", out)
            await self._send_of("output_audio_transcript.done", out, transcript=out.text)
        else:
            await self._send_of("output_text.done", out, text=out.text)
        part = out.part(self._settings.spoken)
        await self._send_of("content_part.done", out, part=part)
        out.status = status
        if out.item is not None:
            out.item.status = out.status
        await self._finish(out, self._before if out.index == 0 else self._output[out.index - 1].id)

    async def _call(self, call: Call) -> None:
        self._calls += 1
        self._served.muted = True  # a call is not meant to be heard: speech is left out
        item, before = None, None
        if self.message is not None:
            kept = [out.id for out in self._output if out.item is not None]
            after = [*([self._before] if self._before else []), self.message.id, *kept]
            item, before = await self._connection.in_thread(self._items.add_call, call, after)
        if not self._output:
            before = self._before
        out = self._add_output(item, call)
        begun = out.json(self._settings.spoken, "in_progress") | {"arguments": ""}
        await self._announce(out, begun, before)
        fields = {"call_id": call.id}
        kind = "response.function_call_arguments"
        await self._send_item(f"{kind}.delta", out, delta=call.arguments, **fields)
        fields["name"] = call.name
        await self._send_item(f"{kind}.done", out, arguments=call.arguments, **fields)
        await self._finish(out, before)

    def _add_output(self, item: ConversationItem | None, call: Call | None = None) -> "_OutputItem":
        item_id = new_id("item_") if item is None else item.id
        self._output.append(_OutputItem(len(self._output), item_id, item, call))
        return self._output[-1]

    async def _announce(self, out: "_OutputItem", shown: Json, before: str | None) -> None:
        """Send the events of an item that begins. before: id of the previous item."""
        await self._send_item("response.output_item.added", out, item=shown)
        if out.item is not None:
            fields = {"item": shown, "previous_item_id": before}
            await self._connection.send("conversation.item.added", **fields)

    async def _finish(self, out: "_OutputItem", before: str | None) -> None:
        """Send the events of an item that ends. before: id of the previous item."""
        shown = out.json(self._settings.spoken)
        if out.item is not None:
            fields = {"item": shown, "previous_item_id": before}
            await self._connection.send("conversation.item.done", **fields)
        await self._send_item("response.output_item.done", out, item=shown)

    async def _settle(self) -> None:
        """Make the conversation's item match the text that clients got, unless it does."""
        if self.message is not None:
            await self._connection.in_thread(self._settle_once, self.message)

    def _settle_once(self, message: ConversationItem) -> None:
        """Settle the reply's item. For the session's thread: a call that has begun there ends.

        The task that waits for it may be cancelled meanwhile, and `end` then calls it again.
        """
        if self._settled:
            return
        self._settled = True
        told = next((out for out in self._output if out.item is message), None)
        if told is None:
            self._items.forget(message)
        else:
            as_it_is = not self._calls and not self._dropped
            self._items.settle(message, told.text, as_it_is)

    async def _created(self) -> None:
        await self._connection.send("response.created", response=self._json("in_progress"))
        rates = self._connection.service.rates.left(self._connection.context.owner)
        await self._connection.send("rate_limits.updated", rate_limits=rates)

    async def _done(self, result: SpeechResult | None, error: ApiError | None) -> None:
        made = self._json("completed")
        details: Json | None = None
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
        self._note(result, made["status"], error)
        self._on_done()
        await self._connection.send("response.done", response=made)

    def _note(self, result: SpeechResult | None, status: str, error: ApiError | None) -> None:
        context = Context(
            self.id, "RESPONSE", self._connection.context.path, self._connection.context.owner
        )
        context.error = None if error is None else error.code
        if result is not None:
            context.finished(result)
            if self._connection.service.settings.log_content:
                context.answer = result.text
        fields = context.log_fields() | {"status": status, "method": None, "seconds": None}
        logs.event("response", session=self._connection.context.request_id, **fields)

    def _json(self, status: str) -> Json:
        kept = self._settings.kept
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": None,
            "output": [out.json(self._settings.spoken) for out in self._output],
            "conversation_id": self._items.id if kept else None,
            "usage": None,
            **self._settings.shown,
        }

    async def _send_item(self, kind: str, out: "_OutputItem", **fields: Any) -> None:
        """Send an event about an item of this response."""
        if "item" not in fields:
            fields["item_id"] = out.id
        await self._connection.send(kind, response_id=self.id, output_index=out.index, **fields)

    async def _send_of(self, kind: str, out: "_OutputItem", **fields: Any) -> None:
        """Send an event about the one content part of an item."""
        await self._send_item(f"response.{kind}", out, content_index=0, **fields)


@dataclass
class _OutputItem:
    """Item of a response in progress. item: its item in the conversation, None if not kept."""

    index: int
    id: str
    item: ConversationItem | None
    call: Call | None = None
    text: str = ""
    status: str = "completed"

    def json(self, spoken: bool, status: str | None = None) -> Json:
        made: Json = {"id": self.id, "object": "realtime.item", "status": status or self.status}
        if self.call is not None:
            made |= {"type": "function_call", "call_id": self.call.id, "name": self.call.name}
            return made | {"arguments": self.call.arguments}
        kind, name = ("output_audio", "transcript") if spoken else ("output_text", "text")
        content = [] if status == "in_progress" else [{"type": kind, name: self.text}]
        return made | {"type": "message", "role": "assistant", "content": content}

    def part(self, spoken: bool, empty: bool = False) -> Json:
        text = "" if empty else self.text
        return {"type": "audio", "transcript": text} if spoken else {"type": "text", "text": text}
