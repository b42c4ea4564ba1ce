"""The way that every endpoint reads a reply: turns, the clock of its client, and its end."""

from types import SimpleNamespace
from typing import Any

import pytest

from qwen3_omni_neuron.events import AudioChunk, Event, Finished
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.endpoints.answer import ServedStream
from testing.scripted_model import ScriptedStream

TEXTS = ("One ", "two ", "three")
CHUNK_S = 0.08


class Served:
    """A spoken reply of TEXTS, as one client gets it. done: turns and ends, in their order."""

    def __init__(self, error: Exception | None = None, **settings: Any):
        self.done: list[str] = []
        service: Any = SimpleNamespace(turnstile=self, metrics=self)
        self.context = Context("req", "POST", "/")
        self.context.place = SimpleNamespace(leave=lambda: self.done.append("left"))  # type: ignore[assignment]
        self.context.account = SimpleNamespace(add=lambda _: None)  # type: ignore[assignment]
        stream: Any = ScriptedStream(TEXTS, True, error)
        self.stream = ServedStream(stream, service, self.context, **settings)

    async def wait(self) -> None:
        self.done.append("turn")

    def finished(self, *_: Any) -> None:
        self.done.append("counted")

    def read(self, lists: int = 100) -> list[list[Event]]:
        """Read so many lists, or all. Nothing in it waits, so that it needs no event loop."""
        found: list[list[Event]] = []
        while len(found) < lists:
            try:
                self.stream.__anext__().send(None)
            except StopAsyncIteration:
                break
            except StopIteration as returned:
                found.append(returned.value)
                self.done += [type(event).__name__ for event in found[-1]]
        return found


def test_only_a_chunk_that_the_client_plays_others_before_waits_for_a_turn() -> None:
    served = Served()
    served.read()
    first, later = ["TextDelta", "AudioChunk"], ["TextDelta", "turn", "AudioChunk"]
    assert served.done == [*first, *later, *later, "Finished", "counted", "left"]


def test_each_burst_waits_for_a_turn_once_the_client_has_sound() -> None:
    served = Served(bursts=True)
    assert [len(events) for events in served.read()] == [2, 2, 2, 1]
    both = ["TextDelta", "AudioChunk", "turn"]
    assert served.done == [*both, *both, *both, "Finished", "counted", "left"]


@pytest.mark.parametrize("bursts", [False, True])
def test_a_chunk_counts_as_played_once_the_next_events_are_taken(bursts) -> None:
    served = Served(bursts=bursts)
    last = served.read(1 if bursts else 2)[-1]
    assert isinstance(last[-1], AudioChunk)
    assert served.stream.playback.sent_s == 0
    served.read(1)
    assert served.stream.playback.sent_s == CHUNK_S


def test_the_clock_counts_what_the_client_plays() -> None:
    served = Served(speed=2.0)
    served.read(4)
    served.stream.muted = True
    served.read()
    assert served.stream.playback.sent_s == CHUNK_S / 2


@pytest.mark.parametrize("how", ["given up", "failed", "read"])
def test_a_reply_is_counted_and_logged_at_its_end_alone(how) -> None:
    served = Served(ValueError() if how == "failed" else None)
    if how == "failed":
        with pytest.raises(ValueError):
            served.read()
    else:
        events = served.read(7 if how == "given up" else 100)
        assert isinstance(events[-1][0], Finished)
    assert ("counted" in served.done) == (how == "read")
    assert ("left" in served.done) == ("frames" in served.context.fields) == (how == "read")
