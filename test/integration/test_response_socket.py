"""/v1/responses over a WebSocket, by OpenAI's own client."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import NotFoundError
from websockets.exceptions import ConnectionClosed, InvalidStatus

from qwen3_omni_neuron.serving.server import Server
from testing.http_server import client_of, serving, wait_until

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
ASKED: dict[str, Any] = {"input": "Hello there", "max_output_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def server(omni) -> Iterator[Server]:
    with serving(omni, max_realtime_sessions=2) as running:
        yield running


def kinds(events: list[Any]) -> list[str]:
    """Return the types of events, with deltas that follow each other as one."""
    found = [event.type for event in events]
    return [kind for kind, last in zip(found, [None, *found], strict=False) if kind != last]


def turn(socket: Any, **asked: Any) -> list[Any]:
    """Return the events of one turn."""
    socket.response.create(**{**ASKED, **asked})
    events = [socket.recv()]
    while events[-1].type not in ENDS:
        events.append(socket.recv())
    return events


def test_events_are_those_of_a_streamed_post_one_turn_after_the_other(client) -> None:
    posted = list(client.responses.create(**ASKED, stream=True))
    with client.responses.connect() as socket:
        turns = [turn(socket), turn(socket)]
        socket.response.create(**ASKED)  # a turn waits for the end of the one before
        turns += [turn(socket), turn(socket, input="Hello there")]
    for events in turns:
        assert kinds(events) == kinds(posted)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].response.output[0].content == posted[-1].response.output[0].content


def test_a_turn_that_is_not_stored_is_continued_on_its_socket_alone(client) -> None:
    with client.responses.connect() as socket, client.responses.connect() as other:
        first = turn(socket, store=False)[-1].response
        assert not first.store
        with pytest.raises(NotFoundError):
            client.responses.retrieve(first.id)
        refused = turn(other, previous_response_id=first.id)[-1]
        assert refused.error.code == "previous_response_not_found"
        second = turn(socket, previous_response_id=first.id, store=False)[-1].response
        both = [{"role": "user", "content": ASKED["input"]}]
        both += [{"role": "assistant", "content": first.output[0].content[0].text}, *both]
        whole = client.responses.create(**{**ASKED, "input": both})
        assert second.usage.input_tokens == whole.usage.input_tokens
        kept = turn(socket, previous_response_id=second.id, store=True)[-1].response
        assert kept.store and client.responses.retrieve(kept.id).id == kept.id


def test_a_turn_without_output_is_continued(client) -> None:
    with client.responses.connect() as socket:
        events = turn(socket, generate=False, store=False)
        begun = ["response.created", "response.in_progress", "response.completed"]
        assert [event.type for event in events] == begun
        prepared = events[-1].response
        assert prepared.output == []
        alone = turn(socket, store=False)[-1].response.usage.input_tokens
        prepared = turn(socket, generate=False, store=False)[-1].response
        continued = turn(socket, previous_response_id=prepared.id)[-1].response
        assert continued.usage.input_tokens > alone


def test_an_error_is_an_event_and_the_socket_goes_on(client) -> None:
    with client.responses.connect() as socket:
        for wrong, status, param in (
            ({"temperature": 3}, 400, "temperature"),
            ({"model": "other"}, 404, "model"),
            ({"type": "response.steer"}, 400, "type"),
            ({"stream_id": "a"}, 400, "stream_id"),
        ):
            socket.send({"type": "response.create", **ASKED, **wrong})
            event = socket.recv()
            assert (event.type, event.status, event.error.param) == ("error", status, param)
        socket._connection.send("{")
        assert socket.recv().error.code == "invalid_json"
        assert turn(socket)[-1].response.output


def test_a_client_that_leaves_ends_its_work(omni, client) -> None:
    with client.responses.connect() as socket:
        socket.response.create(**{**ASKED, "max_output_tokens": 3000})
        assert socket.recv().type == "response.created"
        wait_until(lambda: omni.status().running == 1)
    wait_until(lambda: omni.status().running == 0)


def test_a_cancelled_turn_ends_and_the_next_one_is_answered(omni, client) -> None:
    with client.responses.connect() as socket:
        socket.send({"type": "response.cancel"})  # nothing to cancel
        socket.response.create(**{**ASKED, "max_output_tokens": 3000})
        begun = socket.recv()
        socket.send({"type": "response.cancel", "response_id": begun.response.id})
        while (event := socket.recv()).type not in ENDS:
            pass
        assert (event.type, event.response.status) == ("response.incomplete", "cancelled")
        assert event.response.id == begun.response.id
        assert turn(socket)[-1].response.output
    wait_until(lambda: omni.status().running == 0)


def test_sockets_have_the_limits_of_realtime_sessions(omni, client) -> None:
    with (
        client.responses.connect(),
        client.responses.connect(),
        pytest.raises(InvalidStatus, match="503"),
        client.responses.connect(),
    ):
        pass
    with (
        serving(omni, max_realtime_s=0.3) as server,
        client_of(server) as brief,
        brief.responses.connect() as socket,
        pytest.raises(ConnectionClosed, match="session_expired"),
    ):
        socket.recv()
