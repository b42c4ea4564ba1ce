"""The recorded session of docs/realtime.md: real events, with ids and sound shortened.

    python -m testing.recorded_session

A test compares what it would record today: the events' order, and each one's fields.
"""

import json
import random
import re
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.serving.server import Server
from testing.generated import with_block
from testing.http_server import serving
from testing.imports import ROOT
from testing.realtime import Caller, calling, sound_of
from train.speech import MEASURING, spoken_clip

DOCUMENT, BLOCK = Path("docs/realtime.md"), "session"
RATE = 24000
SENT_MS, HEARD_MS = 400, 200  # least lengths sent and heard of the interrupted answer
EXPIRES_AT = 1800000000  # shown for every session
_TRIES = 5
_SHOWN_LETTERS = 8  # letters of base64

Event = tuple[str, dict[str, Any]]  # sender ("client" or "server"), and the event


class _Recorder(Caller):
    """A caller that notes the events of both sides in order."""

    events: list[Event]

    def next(self) -> Any:
        event = super().next()
        self.events.append(("server", event.to_dict()))
        return event

    def send(self, kind: str, **fields: Any) -> None:
        self.events.append(("client", {"type": kind, **fields}))
        super().send(kind, **fields)

    def truncated(self, item_id: str) -> bool:
        """Return whether the server truncates an item that was interrupted.

        It says so before it answers what is sent next; that question is not recorded.
        """
        super().send("conversation.item.retrieve", item_id=item_id)
        found = self.until("conversation.item.retrieved")
        self.events.pop()
        return any(event.type == "conversation.item.truncated" for event in found)


def record(server: Server) -> list[Event]:
    """Ask a spoken question, play its answer, ask another one and interrupt the answer.

    A slow machine may complete the second answer before it is interrupted, or the sound sent of
    it may have played to its end by then, so that nothing of it is truncated: it is asked again.
    Raises AssertionError where this happens at every try.
    """
    for _ in range(_TRIES):
        events = _recorded(server)
        done = [made["response"] for _, made in events if made["type"] == "response.done"]
        statuses = [response["status"] for response in done]
        truncated = sum(made["type"] == "conversation.item.truncated" for _, made in events)
        if (statuses, truncated) == (["completed", "cancelled"], 2):
            return events
    raise AssertionError(f"the answers' statuses are {statuses}, truncated items {truncated}")


def _recorded(server: Server) -> list[Event]:
    with calling(server) as made:
        caller = _Recorder(made.connection)
        caller.events = [("server", event.to_dict()) for event in made.heard]
        caller.update(
            instructions="You are a helpful assistant.",
            audio={"output": {"voice": "Ethan"}},
            seed=0,
        )
        file = ROOT / "examples" / "sum.wav"
        _ask(caller, soxr.resample(*soundfile.read(file, dtype="float32"), RATE))
        sound = sound_of(caller.until("response.done"))
        time.sleep(len(sound) / 2 / RATE)  # until the sound was played
        clip = spoken_clip("say seven red goodbye white", MEASURING, random.Random(1))
        _ask(caller, soxr.resample(clip, 16000, RATE))
        sent = caller.until("response.output_audio.delta")
        while len(sound_of(sent)) < SENT_MS * 2 * RATE / 1000:
            sent += [caller.next()]
        caller.send("response.cancel")
        item = {"item_id": sent[-1].item_id}
        while (event := caller.next()).type not in ("response.done", "error"):
            pass
        completed = event.type == "error" or event.response.status == "completed"
        if completed or not caller.truncated(**item):
            return caller.events
        cut = {**item, "content_index": 0, "audio_end_ms": HEARD_MS}
        caller.send("conversation.item.truncate", **cut)
        while caller.next().type not in ("conversation.item.truncated", "error"):
            pass
        caller.send("conversation.item.retrieve", **item)
        caller.until("conversation.item.retrieved")
        return caller.events


def _ask(caller: Caller, question: NDArray[np.float32]) -> None:
    """Speak a question, then be silent for as long as server_vad needs."""
    caller.say(np.concatenate((question, np.zeros(RATE, np.float32))), RATE // 10)


def shown(events: list[Event]) -> list[Event]:
    """Return events with numbered ids and shortened sound, without repetition.

    Of appended pieces, and of each kind of delta in a response, the first one is kept.
    """
    left, seen = list[Event](), set[str]()
    numbers: dict[str, str] = {}
    counters: dict[str, Any] = {}
    for side, event in events:
        kind = event["type"]
        if kind in ("input_audio_buffer.speech_started", "response.done"):
            seen.clear()
        if kind in seen:
            continue
        if kind.endswith((".delta", ".append")):
            seen.add(kind)
        fields = {"type": kind} | {name: event[name] for name in event if name != "event_id"}
        left.append((side, _shortened(fields, kind, numbers, counters)))
    return left


def _shortened(value: Any, name: str, numbers: dict[str, str], counters: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(one, key, numbers, counters) for key, one in value.items()}
    if isinstance(value, list):
        return [_shortened(one, name, numbers, counters) for one in value]
    if name == "expires_at":
        return EXPIRES_AT
    if isinstance(value, str):
        kind, _, rest = value.partition("_")
        if len(rest) == 24 and name.endswith("id"):
            if value not in numbers:
                numbers[value] = f"{kind}_{next(counters.setdefault(kind, count(1)))}"
            return numbers[value]
        if name in ("audio", "delta") and len(value) > 200:
            return f"{value[:_SHOWN_LETTERS]}..."
    return value


def form(value: Any) -> Any:
    """Return a value's form: its field names, and the types of its values."""
    if isinstance(value, dict):
        return {key: value[key] if key == "type" else form(value[key]) for key in value}
    if isinstance(value, list):
        return [form(one) for one in value]
    return type(value).__name__


def written(events: list[Event]) -> str:
    """Write events, one a line."""
    lines = [f"{side} {json.dumps(event)}" for side, event in shown(events)]
    return "\n".join(["```text", *lines, "```", ""])


def read(text: str) -> list[Event]:
    """Read what `written` wrote into a document."""
    found = re.findall(r"^(client|server) (\{.*\})$", text, re.MULTILINE)
    return [(side, json.loads(made)) for side, made in found]


def main() -> None:
    """Record a session with the checkpoint that ships, and write it into the document."""
    with Qwen3Omni.load(SPEAKING_CHECKPOINT) as omni, serving(omni) as server:
        made = written(record(server))
    path = ROOT / DOCUMENT
    path.write_text(with_block(path.read_text(encoding="utf-8"), BLOCK, made), encoding="utf-8")


if __name__ == "__main__":
    main()
