"""The reading of one reply for a client, the same for every endpoint."""

from collections.abc import AsyncIterator

from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk, Event, Finished
from qwen3_omni_neuron.runtime.playback import Playback
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.service import Service


class ServedStream(AsyncIterator[list[Event]]):
    """Iterator over the events of one reply, in lists that are sent before the next is taken.

    A list has one event, or is one of `SpeechStream.bursts`. A list with a chunk waits for its turn
    in the event loop, unless it is the client's first sound; so does each list of `bursts` from
    then on. A reply that is read to its end is counted in the metrics.
    playback: estimated playback of the chunks that were sent. muted: chunks are not sent any more.
    """

    def __init__(
        self,
        stream: SpeechStream,
        service: Service,
        context: Context | None = None,
        *,
        bursts: bool = False,
        speed: float = 1.0,
    ):
        """context: request that ends with the reply: it is logged, and its place given back.

        speed: factor by which the client's sound is faster than the chunks.
        """
        self.playback, self.muted = Playback(), False
        self._stream, self._service, self._context = stream, service, context
        self._bursts = stream.bursts() if bursts else None
        self._speed = speed
        self._sent: list[Event] = []

    async def __anext__(self) -> list[Event]:
        """Return the next events. Raises the error that ended the reply."""
        for event in self._sent:  # it is with the client by now, or in its connection's buffer
            if isinstance(event, Finished):
                self._end(event)
            elif isinstance(event, AudioChunk) and not self.muted:
                self.playback.arrived(len(event.samples) / SAMPLE_RATE / self._speed)
        self._sent, bursts = [], self._bursts
        events = [await anext(self._stream)] if bursts is None else await anext(bursts)
        takes_turns = bursts is not None or isinstance(events[0], AudioChunk)
        if takes_turns and self.playback.sent_s:  # the client has sound to play meanwhile
            await self._service.turnstile.wait()
        self._sent = events
        return events

    def close(self) -> None:
        """Cancel the reply, if it still runs."""
        self._stream.close()

    def _end(self, finished: Finished) -> None:
        """Count and log a reply that was read to its end."""
        self._service.metrics.finished(finished.result, self.playback)
        if self._context is not None:
            self._context.finished(finished.result)
            self._context.place.leave()
