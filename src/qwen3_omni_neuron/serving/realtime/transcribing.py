"""Transcription of the user's turns by the answering model, window by window."""

import asyncio
from contextlib import closing
from dataclasses import dataclass, field

from qwen3_omni_neuron.events import TextDelta
from qwen3_omni_neuron.prompt.media.windows import GrowingWindows, Window
from qwen3_omni_neuron.prompt.turns import Turn
from qwen3_omni_neuron.serving.edge.quotas import Account
from qwen3_omni_neuron.serving.endpoints.answer import ServedStream
from qwen3_omni_neuron.serving.endpoints.media import sound_bytes
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.fields import bounded_options
from qwen3_omni_neuron.serving.openai.reply import duration_usage, logprob_entries
from qwen3_omni_neuron.serving.realtime.audio_codecs import TURN_RATE, Samples
from qwen3_omni_neuron.serving.realtime.events import ClientGoneError, Connection, Json
from qwen3_omni_neuron.serving.realtime.session_config import SessionConfig
from qwen3_omni_neuron.transcription import JoinedText, stream_window

MOST_WAITING = 16
_KIND = "conversation.item.input_audio_transcription"


@dataclass(eq=False)
class TurnTranscript:
    """Transcript of one turn, from its first sample on.

    logprobs: None if not requested. sound: for the session's thread until the turn ends. item: None
    until then. sent, told: characters and log-probabilities sent. counted: towards its key's rate.
    """

    item_id: str
    logprobs: list[Json] | None
    sound: GrowingWindows = field(default_factory=GrowingWindows)
    item: Turn | None = None
    joined: JoinedText = field(default_factory=JoinedText)
    sent: int = 0
    told: int = 0
    counted: bool = False
    error: Json | None = None
    dropped: bool = False


class Transcriber:
    """Transcriber of one session's turns while they are spoken, concurrent with answers.

    A transcription session sends text immediately; one that answers first awaits the turn's item,
    which clients look for.
    """

    def __init__(self, connection: Connection, account: Account, config: SessionConfig):
        self.config = config
        self._connection, self._account = connection, account
        self._loop = asyncio.get_running_loop()
        # Windows and ends (None) of turns, in order.
        self._waiting: asyncio.Queue[tuple[TurnTranscript, Window | None]] = asyncio.Queue()
        self._ended = 0  # turns that have ended and wait
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    # The session's thread.

    def begin(self, item_id: str) -> TurnTranscript | None:
        """Begin a turn; None: don't transcribe it."""
        if self.config.audio.input.transcription is None:
            return None
        return TurnTranscript(item_id, [] if self.config.include else None)

    def hear(self, turn: TurnTranscript, samples: Samples) -> None:
        """Transcribe a turn's next samples, whose bytes are reserved."""
        held = turn.sound.held + len(samples)
        for window in self._known(turn, held, turn.sound.push(samples)):
            self._loop.call_soon_threadsafe(self._put, turn, window)

    # The event loop.

    def finish(self, turn: TurnTranscript, item: Turn) -> None:
        """End a turn. item: in the conversation."""
        turn.item = item
        if self._ended >= MOST_WAITING:
            self.drop(turn)
            message = f"{MOST_WAITING} turns already wait to be transcribed."
            turn.error = ApiError(429, message, "too_many_transcriptions").body["error"]
        else:
            held = turn.sound.held
            for window in self._known(turn, held, turn.sound.finish()):
                self._put(turn, window)
        self._ended += 1
        self._put(turn, None)

    def drop(self, turn: TurnTranscript) -> None:
        """Forget an unfinished turn."""
        turn.dropped = True
        self._account.release(sound_bytes(turn.sound.held))

    def close(self) -> None:
        """End the running transcription."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            self._task = None  # breaks the reference cycle through its error

    def _put(self, turn: TurnTranscript, window: Window | None) -> None:
        if self._closed:
            return
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._waiting.put_nowait((turn, window))

    def _known(self, turn: TurnTranscript, held: int, windows: list[Window]) -> list[Window]:
        """Release silence beside new windows. held: samples in no window before."""
        silence = held - turn.sound.held - sum(len(window.samples) for window in windows)
        self._account.release(sound_bytes(silence))
        return windows

    async def _run(self) -> None:
        while True:
            turn, window = await self._waiting.get()
            try:
                if window is None:
                    self._ended -= 1
                    await self._complete(turn)
                elif turn.error is None and not turn.dropped:
                    await self._transcribe(turn, window)
            except ClientGoneError:
                return
            except Exception as failure:
                turn.error = self._connection.failed(failure).body["error"]
            finally:
                if window is not None:
                    self._account.release(sound_bytes(len(window.samples)))
                del turn, window

    async def _transcribe(self, turn: TurnTranscript, window: Window) -> None:
        """Transcribe a window as one of the requests."""
        service, owner = self._connection.service, self._connection.context.owner
        if not turn.counted:
            service.rates.count(owner)
            turn.counted = True
        with (
            service.requests.place(owner),
            closing(await service.readers.run(owner, self._served, turn, window)) as served,
        ):
            async for (event,) in served:
                if turn.dropped:
                    return
                if isinstance(event, TextDelta) and event.text:
                    turn.joined.add(event.text)
                    if turn.logprobs is not None:
                        turn.logprobs += logprob_entries(event)
                    await self._tell(turn)
        turn.joined.end_window()

    async def _tell(self, turn: TurnTranscript) -> None:
        text = turn.joined.text
        if (turn.item is not None or not self.config.answers) and turn.sent < len(text):
            delta, turn.sent = text[turn.sent :], len(text)
            fields: Json = {"item_id": turn.item_id, "content_index": 0, "delta": delta}
            if turn.logprobs is not None:
                fields["logprobs"], turn.told = turn.logprobs[turn.told :], len(turn.logprobs)
            await self._connection.send(f"{_KIND}.delta", **fields)

    async def _complete(self, turn: TurnTranscript) -> None:
        fields: Json = {"item_id": turn.item_id, "content_index": 0}
        if turn.error is not None:
            await self._connection.send(f"{_KIND}.failed", **fields, error=turn.error)
            return
        await self._tell(turn)
        text, item = turn.joined.text, turn.item
        assert item is not None
        await self._connection.in_thread(item.shown["content"][0].__setitem__, "transcript", text)
        if turn.logprobs is not None:
            fields["logprobs"] = turn.logprobs
        fields["usage"] = duration_usage(turn.sound.length / TURN_RATE)
        await self._connection.send(f"{_KIND}.completed", **fields, transcript=text)

    def _served(self, turn: TurnTranscript, window: Window) -> ServedStream:
        service = self._connection.service
        omni = service.model.take()
        options = bounded_options({}, service.settings, self._connection.context.owner)
        stream = stream_window(omni, window, logprobs=turn.logprobs is not None, **options)
        return ServedStream(stream, service)
