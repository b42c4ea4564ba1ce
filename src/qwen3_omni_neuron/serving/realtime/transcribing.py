"""Transcription of the user's turns by the model that answers, one after the other."""

import asyncio
from typing import Any

from qwen3_omni_neuron.events import Finished, TextDelta
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.bodies import bounded_options
from qwen3_omni_neuron.serving.errors import ApiError
from qwen3_omni_neuron.serving.media import sound_bytes
from qwen3_omni_neuron.serving.quotas import Account
from qwen3_omni_neuron.serving.realtime.audio_codecs import TURN_RATE, Samples
from qwen3_omni_neuron.serving.realtime.connection import Connection
from qwen3_omni_neuron.serving.realtime.events import ClientGoneError
from qwen3_omni_neuron.serving.realtime.items import ConversationItem
from qwen3_omni_neuron.serving.usage import duration_usage
from qwen3_omni_neuron.transcription import stream_transcript

MOST_WAITING = 16


class Transcriber:
    """Transcriber of one session's turns, concurrent with its answers.

    account: the session's account; it also counts a second copy of the waiting turns' sound.
    """

    def __init__(self, connection: Connection, account: Account):
        self._connection, self._account = connection, account
        self._waiting: asyncio.Queue[tuple[ConversationItem, Samples]] = asyncio.Queue(MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    def add(self, item: ConversationItem, samples: Samples) -> None:
        """Transcribe a turn after the earlier ones. Raises ApiError."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        if self._waiting.full():
            message = f"{MOST_WAITING} turns wait to be transcribed already."
            raise ApiError(429, message, "too_many_transcriptions")
        self._account.hold(sound_bytes(samples))
        self._waiting.put_nowait((item, samples))

    def close(self) -> None:
        """End the running transcription."""
        if self._task is not None:
            self._task.cancel()
            self._task = None  # breaks the reference cycle through its error

    async def _run(self) -> None:
        while True:
            item, samples = await self._waiting.get()
            fields = {"item_id": item.id, "content_index": 0}
            kind = "conversation.item.input_audio_transcription"
            try:
                await self._transcribe(kind, item, samples, fields)
            except ClientGoneError:
                return
            except Exception as failure:
                error = self._connection.failed(failure).body["error"]
                await self._connection.send(f"{kind}.failed", **fields, error=error)
            finally:
                self._account.release(sound_bytes(samples))
                del item, samples

    async def _transcribe(
        self, kind: str, item: ConversationItem, samples: Samples, fields: dict[str, Any]
    ) -> None:
        connection, texts = self._connection, []
        service, owner = connection.service, connection.context.owner
        service.rates.count(owner)
        with (
            service.requests.place(owner),
            await service.model.start(self._stream, samples) as stream,
        ):
            async for event in stream:
                if isinstance(event, TextDelta):
                    texts.append(event.text)
                    await connection.send(f"{kind}.delta", **fields, delta=event.text)
                elif isinstance(event, Finished):
                    seconds = len(samples) / TURN_RATE
        usage = duration_usage(seconds)
        transcript = "".join(texts)
        item.shown["content"][0]["transcript"] = transcript
        await connection.send(f"{kind}.completed", **fields, transcript=transcript, usage=usage)

    def _stream(self, samples: Samples) -> SpeechStream:
        service = self._connection.service
        options = bounded_options({}, service.settings, self._connection.context.owner)
        audio = {"audio": samples, "sampling_rate": TURN_RATE}
        return stream_transcript(service.model.take(), audio, **options)
