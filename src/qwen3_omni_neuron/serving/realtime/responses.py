"""Responses of a session: one at a time, while earlier ones' sound may still play."""

import asyncio
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from qwen3_omni_neuron.errors import InputError, Qwen3OmniError
from qwen3_omni_neuron.prompt.turns import Reply, Turn
from qwen3_omni_neuron.runtime.schedule import Playback
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.fields import bounded_options, has_grammar
from qwen3_omni_neuron.serving.realtime.events import Connection, ItemReference, read_items
from qwen3_omni_neuron.serving.realtime.input_buffer import InputBuffer
from qwen3_omni_neuron.serving.realtime.items import EMPTY_MESSAGE, ConversationItems
from qwen3_omni_neuron.serving.realtime.response_stream import CancelReason, Response
from qwen3_omni_neuron.serving.realtime.session_config import (
    ResponseConfig,
    SessionConfig,
    options_of,
    speaks,
)
from qwen3_omni_neuron.session import ReplyStream

# A reply's stream, and the id of the item before it.
StartedReply = tuple[ReplyStream, str | None]


class Responses:
    """Responses of one session. draining: the server ends, so none starts."""

    def __init__(self, connection: Connection, items: ConversationItems, input_buffer: InputBuffer):
        self._connection, self._items, self._input = connection, items, input_buffer
        self.draining = False
        self._last: Response | None = None
        # Replies whose sound may still play, in order; None: not in the conversation.
        self._spoken: list[tuple[Reply | None, Playback]] = []
        self._held = ExitStack()  # the last one's place and own input, until its end

    @property
    def running(self) -> bool:
        """True while a response is generated."""
        return self._last is not None and self._last.running

    async def start(self, config: SessionConfig, overrides: ResponseConfig) -> None:
        """Start a response. Raises ApiError and the errors of the API."""
        if not config.answers:
            message = "a session of type transcription has no responses. Use type realtime."
            raise ApiError(400, message, "unsupported", "type")
        if self._last is not None and self.running:
            raise ApiError(
                400,
                f"response {self._last.id} is in progress. Wait for response.done, or send "
                "response.cancel.",
                "conversation_already_has_active_response",
            )
        if self.draining:
            message = "the server is shutting down: no response can start. Open another session."
            raise ApiError(503, message, "server_draining")
        service, owner = self._connection.service, self._connection.context.owner
        service.rates.count(owner)
        spoken = speaks(overrides if overrides.output_modalities else config)
        options = reply_options(self._connection, config, overrides)
        with ExitStack() as held:
            held.enter_context(service.requests.place(owner))
            own_input = await self._own_input(overrides, held)
            shared = self._connection, self._items, self._ended
            response = Response(config, overrides, spoken, bool(options["tools"]), *shared)
            try:
                if has_grammar(options):
                    options["grammar"] = await self._compiled(options, held)
                started = await self._begin_in_thread(config, overrides, own_input, spoken, options)
            except InputError:
                raise
            except Qwen3OmniError as error:
                return await response.refuse(self._connection.failed(error))
            self._held = held.pop_all()
        self._last = response
        response.begin(*started)
        if spoken:
            self._spoken = [earlier for earlier in self._spoken if earlier[1].left_s]
            if self._spoken:  # clients play it after them
                response.playback.until_s = self._spoken[-1][1].until_s
            self._spoken.append((response.message, response.playback))
        return None

    async def cancel(self, response_id: str | None) -> None:
        """Cancel the response. response_id: if the client named one. Raises ApiError."""
        last = self._last
        if last is None or not last.running or response_id not in (None, last.id):
            raise ApiError(
                400,
                # LiveKit's client recognises this message's beginning.
                "Cancellation failed: no such response is in progress.",
                "response_cancel_not_active",
                "response_id",
            )
        await self.interrupt("client_cancelled")

    async def ended(self) -> None:
        """Wait until no response is generated."""
        if self._last is not None:
            await self._last.ended()

    async def clear_output(self) -> None:
        """Cancel the response of a client that stopped playback."""
        last = self._last
        await self.interrupt("client_cancelled")
        if last is not None:
            await self._connection.send("output_audio_buffer.cleared", response_id=last.id)

    def abandon(self, reason: CancelReason) -> None:
        """Stop the response's generation; `interrupt` sends its last events."""
        if self._last is not None:
            self._last.abandon(reason)

    async def interrupt(self, reason: CancelReason) -> None:
        """Cancel the response, and truncate playing items to the played part."""
        playing = [(r, p.heard_s) for r, p in self._spoken if r is not None and p.left_s]
        self._spoken = []
        if self._last is not None and self._last.running:
            self._last.abandon(reason)
            await self._last.ended()
        for reply, heard_s in playing:
            if not reply.sent_s:
                continue
            heard_ms = int(1000 * min(heard_s, reply.sent_s))
            with suppress(ApiError):  # the client has deleted the item
                await self._items.truncate(reply.shown["id"], 0, heard_ms)

    def truncated(self, item_id: str) -> None:
        """Note that a client truncated an item, where it stopped playback."""
        ids = [None if reply is None else reply.id for reply, _ in self._spoken]
        if item_id in ids:
            del self._spoken[: ids.index(item_id) + 1]

    async def close(self) -> None:
        """End the response of a client that has left."""
        self._held.close()
        if self._last is not None:
            await self._last.end()
        self._last = None  # breaks its reference cycle with this object

    def _ended(self) -> None:
        self._held.close()
        self._input.expect_speech(self._spoken[-1][1].left_s if self._spoken else 0.0)

    async def _own_input(
        self, overrides: ResponseConfig, held: ExitStack
    ) -> list[Turn | ItemReference] | None:
        """Read a response's own input, or None. held: stack for its resources."""
        if overrides.input is None:
            return None
        own_input: list[Turn | ItemReference] = []
        for item in await self._connection.in_thread(read_items, overrides.input):
            if isinstance(item, ItemReference):
                own_input.append(item)
            else:
                draft, _ = await self._items.draft(item, self._input.codec)
                held.callback(self._items.account.release, draft.size)
                own_input.append(draft)
        return own_input

    async def _compiled(self, options: dict[str, Any], held: ExitStack) -> Any:
        account, omni = self._items.account, self._connection.service.model.omni
        assert omni is not None  # a session begins with it

        def admit(size: int) -> None:
            account.hold(size)
            held.callback(account.release, size)

        compile_grammar = partial(omni.compile_grammar, admit, **options)
        compiling = await self._connection.in_thread(compile_grammar)
        return None if compiling is None else await asyncio.wrap_future(compiling)

    async def _begin_in_thread(self, *given: Any) -> StartedReply:
        """Call `_begin` in the session's thread. Cancelling the task leaves no reply running."""
        future = self._connection.pool.submit(self._connection.in_own_turn, self._begin, *given)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._connection.pool.submit(self._undo, future)  # runs after `_begin`
            raise

    def _undo(self, begun: "Future[StartedReply]") -> None:
        if begun.cancelled() or begun.exception() is not None:
            return
        stream, _ = begun.result()
        stream.close()
        if stream.reply.id is not None:
            self._items.forget(stream.reply)

    def _begin(
        self,
        config: SessionConfig,
        overrides: ResponseConfig,
        own_input: list[Turn | ItemReference] | None,
        spoken: bool,
        options: dict[str, Any],
    ) -> StartedReply:
        items, session = self._items, self._items.session
        turns = session.turns if own_input is None else items.input_of(own_input)
        kept = overrides.conversation == "auto"
        system = config.instructions if overrides.instructions is None else overrides.instructions
        if not turns or turns[-1].role not in ("user", "tool"):
            turns = [*turns, session.read(EMPTY_MESSAGE)]
        stream = session.respond(spoken, turns=turns, system=system or None, keep=kept, **options)
        speed = config.audio.output.speed
        return stream, items.begin_reply(stream.reply, speed) if kept else None


def reply_options(
    connection: Connection, *configs: SessionConfig | ResponseConfig
) -> dict[str, Any]:
    """Return a reply's options; the last configuration takes precedence. Raises ApiError."""
    options = options_of(*configs) | {"literal_text": True}
    return bounded_options(options, connection.service.settings, connection.context.owner)
