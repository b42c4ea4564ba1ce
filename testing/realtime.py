"""A client of /v1/realtime over OpenAI's: it sends samples, and checks every event's type."""

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import soundfile
from numpy.typing import NDArray
from openai import OpenAI
from openai.resources.realtime.realtime import RealtimeConnection
from openai.types.realtime import RealtimeServerEvent
from pydantic import BaseModel

from qwen3_omni_neuron.events.encoding import pcm16
from qwen3_omni_neuron.serving.server import Server
from testing.http_server import url_of
from testing.media_cases import QUESTION_WAV

_KINDS: tuple[type[BaseModel], ...] = get_args(get_args(RealtimeServerEvent)[0])
EVENTS = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in _KINDS}
WAIT_S = 20.0  # for the next event
PIECE = 1600  # samples of one append: 100 ms
PCM_16K = {"type": "audio/pcm", "rate": 16000}
BEFORE = ("response.output_item.added", "conversation.item.added", "response.content_part.added")
AFTER = ("response.content_part.done", "conversation.item.done", "response.output_item.done")
PUSH_TO_TALK = {"input": {"format": PCM_16K, "turn_detection": None}}
SHORT: dict[str, Any] = {"seed": 3, "thinker_max_new_tokens": 6, "talker_max_new_tokens": 12}
# No token ends the text.
LONG = {"thinker_eos_token_id": 10**6, "thinker_max_new_tokens": 3000, "chunk_frames": [1]}
LONG |= {"talker_max_new_tokens": 4000}
SPOKEN = [  # kinds of events of a spoken response
    *("response.created", "rate_limits.updated", *BEFORE),
    *("response.output_audio_transcript.delta", "response.output_audio.delta"),
    *("response.output_audio.done", "response.output_audio_transcript.done", *AFTER),
    "response.done",
]


class Caller:
    """One open session. heard: all events so far, oldest first."""

    def __init__(self, connection: RealtimeConnection):
        self.connection = connection
        self.heard: list[Any] = []

    def next(self) -> Any:
        """Receive an event. Raises pydantic's ValidationError if OpenAI has no type for it."""
        data: Any = self.connection._connection.recv(timeout=WAIT_S, decode=False)
        kind = self.connection.parse_event(data).type
        # Sound at 16 kHz is an addition of this server.
        event: Any = EVENTS[kind].model_validate_json(
            data.replace(b'"rate":16000', b'"rate":24000')
        )
        self.heard.append(event)
        return event

    def until(self, kind: str) -> list[Any]:
        """Receive events up to the first of a type. Raises AssertionError for an error before."""
        found: list[Any] = []
        while not found or found[-1].type != kind:
            found.append(self.next())
            assert kind == "error" or found[-1].type != "error", found[-1]
        return found

    def send(self, kind: str, **fields: Any) -> None:
        self.connection.send({"type": kind, **fields})  # type: ignore[arg-type]

    def update(self, **fields: Any) -> Any:
        """Change the session, and return the changed session."""
        self.send("session.update", session={"type": "realtime", **fields})
        return self.until("session.updated")[-1].session

    def say(self, samples: NDArray[np.float32], piece: int = PIECE) -> None:
        """Append samples, at the session's rate."""
        for start in range(0, len(samples), piece):
            data = pcm16(samples[start : start + piece])
            self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    def write(self, text: str, role: str = "user", **fields: Any) -> Any:
        """Put a message into the conversation and return its item."""
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": text}]
        item = {"type": "message", "role": role, "content": content}
        self.send("conversation.item.create", item=item, **fields)
        return self.until("conversation.item.done")[-1].item

    def answer(self, **fields: Any) -> list[Any]:
        """Ask for a response and return its events."""
        self.send("response.create", response=fields)
        return self.until("response.done")


@contextmanager
def calling(
    server: Server, key: str = "none", model: str | None = None, **options: Any
) -> Iterator[Caller]:
    """Open a session of a server, and take its first event."""
    client = OpenAI(base_url=f"{url_of(server)}/v1", api_key=key)
    with (
        client,
        client.realtime.connect(model=model or server.settings.model_name, **options) as made,
    ):
        caller = Caller(made)
        assert caller.next().type == "session.created"
        yield caller


def kinds(events: Sequence[Any]) -> list[str]:
    """Return the types of events in order; successive deltas of one kind count once."""
    found: list[str] = []
    for event in events:
        if not (event.type.endswith(".delta") and event.type in found):
            found.append(event.type)
    return found


def sound_of(events: Sequence[Any]) -> bytes:
    """Return the bytes of a response's sound."""
    parts = [e.delta for e in events if e.type == "response.output_audio.delta"]
    return b"".join(base64.b64decode(part) for part in parts)


def text_of(events: Sequence[Any]) -> str:
    """Return the text of a response's first item."""
    content = events[-1].response.output[0].content[0]
    return content.transcript if content.type == "output_audio" else content.text


def said(samples: NDArray[np.float32]) -> dict[str, Any]:
    """Return a user's message of samples at 16 kHz, as they are once sent in 16 bits."""
    heard = np.frombuffer(pcm16(samples), "<i2")
    item = {"type": "audio", "audio": heard, "sampling_rate": PCM_16K["rate"]}
    return {"role": "user", "content": [item]}


def question() -> NDArray[np.float32]:
    """Return the samples of "what is six plus two", at 16 kHz."""
    return soundfile.read(QUESTION_WAV.with_name("sum.wav"), dtype="float32")[0]
