"""A spoken call to a realtime endpoint: a microphone and a player, both at the speed of speech.

Only events that OpenAI documents are used, so that any server of that API can be called. One thread
sends each piece when its last sample has been spoken, and receives until the next one is due.
"""

import base64
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.sync.client import ClientConnection

from testing.command_line import InputError
from testing.metrics import ChunkArrival, playing
from testing.websocket_client import append, received, send

CALL_RATE = 24000  # of OpenAI's audio/pcm


@dataclass
class Answer:
    """One response as the caller heard it. Times are of the call's clock, in seconds.

    words_s, stopped_s: when the first words of its transcript came, and when the player dropped it;
    None where that did not happen. status: as response.done has it, None before.
    """

    created_s: float
    chunks: list[ChunkArrival] = field(default_factory=list)
    words_s: float | None = None
    status: str | None = None
    stopped_s: float | None = None

    @property
    def complete(self) -> bool:
        """True for an answer that is whole and was not cancelled."""
        return self.status not in (None, "cancelled")

    @property
    def played_until_s(self) -> float:
        """Time at which it would be played to its end, dropped or not; -inf without sound."""
        return playing(self.chunks, CALL_RATE)[-1][1] if self.chunks else -math.inf

    @property
    def late(self) -> list[ChunkArrival]:
        """Chunks that came after the player had dropped it."""
        return [c for c in self.chunks if self.stopped_s is not None and c.at_s > self.stopped_s]

    @property
    def silent_from_s(self) -> float:
        """Time of silence again: the player drops what it has, and plays what comes later."""
        if self.stopped_s is None:
            return self.played_until_s
        return playing(self.late, CALL_RATE)[-1][1] if self.late else self.stopped_s


class Call:
    """A call over an open session.

    answers: all so far, oldest first. transcribed_s: when each transcript of a turn was complete.
    """

    def __init__(
        self,
        socket: ClientConnection,
        rate: int = CALL_RATE,
        piece_ms: int = 100,
        now: Callable[[], float] = time.perf_counter,
    ):
        """rate: of what is spoken, in Hz; answers have CALL_RATE."""
        self._socket, self._rate, self._now = socket, rate, now
        self._piece = rate * piece_ms // 1000
        self._spoken_s = now()  # when the last sample so far is spoken
        self._by_id: dict[str, Answer] = {}
        self.answers: list[Answer] = []
        self.transcribed_s: list[float] = []

    @property
    def spoken_s(self) -> float:
        """Time at which the next sample begins to be spoken."""
        return self._spoken_s

    def configure(self, **session: Any) -> None:
        """Change the session, and wait until the server has. Raises InputError."""
        send(self._socket, "session.update", session={"type": "realtime", **session})
        until_s = self._now() + 30
        while self._receive(until_s) != "session.updated":
            if self._now() >= until_s:
                raise InputError("the server did not answer session.update within 30 s.")
        self._spoken_s = self._now()

    def speak(self, samples: NDArray[np.float32]) -> float:
        """Speak samples at the call's rate. Returns when the last piece was sent."""
        sent_s = self._now()
        for first in range(0, len(samples), self._piece):
            piece = samples[first : first + self._piece]
            self._spoken_s += len(piece) / self._rate
            while self._receive(self._spoken_s) is not None:
                pass
            sent_s = self._now()
            append(self._socket, piece)
        return sent_s

    def wait(self, until: Callable[[], bool], limit_s: float, silence: bool = True) -> bool:
        """Go on until something holds. Returns whether it came to hold within the limit.

        silence: whether the microphone sends it meanwhile, or nothing at all.
        """
        end_s = self._now() + limit_s
        while not until() and self._now() < end_s:
            if silence:
                self.speak(np.zeros(self._piece, np.float32))
            else:
                self._receive(end_s)
                self._spoken_s = self._now()
        return until()

    def ask(self) -> None:
        """End the turn without the server's turn detection, and ask for its answer."""
        send(self._socket, "input_audio_buffer.commit")
        send(self._socket, "response.create")

    def answer_after(self, ended_s: float) -> Answer | None:
        """Return the first answer that was begun after a time and is complete, if there is one."""
        return next((a for a in self.answers if a.created_s >= ended_s and a.complete), None)

    def _receive(self, until_s: float) -> str | None:
        """Receive an event before a time. Returns its type, or None at that time."""
        event: Any = None
        try:
            event = received(self._socket, max(0.0, until_s - self._now()))
            self._note(event, self._now())
            return str(event["type"])
        except TimeoutError:
            return None
        except InputError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            said = "something other than an event" if event is None else repr(event)[:200]
            raise InputError(f"the server sent {said}: OpenAI documents none like it.") from error

    def _note(self, event: dict[str, Any], at_s: float) -> None:
        kind = event["type"]
        if kind == "error":
            raise InputError(f"the server sent an error: {event['error'].get('message')}")
        if kind == "response.created":
            self.answers.append(Answer(at_s))
            self._by_id[event["response"]["id"]] = self.answers[-1]
        elif kind == "input_audio_buffer.speech_started":
            for answer in self.answers:
                unheard = answer.status is None or answer.played_until_s > at_s
                if answer.stopped_s is None and unheard:
                    answer.stopped_s = at_s
        elif kind == "response.done":
            self._by_id[event["response"]["id"]].status = event["response"]["status"]
        elif kind == "response.output_audio.delta":
            samples = len(base64.b64decode(event["delta"])) // 2
            self._by_id[event["response_id"]].chunks.append(ChunkArrival(at_s, samples, 1))
        elif kind == "response.output_audio_transcript.delta":
            answer = self._by_id[event["response_id"]]
            answer.words_s = at_s if answer.words_s is None else answer.words_s
        elif kind == "conversation.item.input_audio_transcription.completed":
            self.transcribed_s.append(at_s)
