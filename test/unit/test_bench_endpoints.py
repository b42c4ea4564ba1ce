"""The judges of other servers: what a scripted server does wrong is counted, to the moment.

The servers are scripted in a time of their own, in which a piece of sound lasts as long as it says
and nothing else takes any: every figure is exact.
"""

import base64
import heapq
import itertools
import json
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, get_type_hints

import numpy as np
import pytest
import soundfile
from openai.types.chat import completion_create_params
from openai.types.realtime import RealtimeClientEvent
from pydantic import BaseModel, TypeAdapter
from websockets.sync.server import ServerConnection, serve

from bench import realtime, serve_load
from bench.common.call import CALL_RATE, Call
from testing.realtime import question
from testing.results import load_results

OPTIONS = Namespace(turns=1, pauses_ms=[300, 600], detection="server_vad")
CLIENT_EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeClientEvent)
CHAT_FIELDS = set(get_type_hints(completion_create_params.CompletionCreateParamsStreaming))
PIECE_S = 0.02
CHUNK_S = 0.2
FIRST_WORD_S, FIRST_SAMPLE_S = 0.1, 0.25  # from the end of a turn


class Endpoint:
    """Scripted server behind a socket, with its own time: it is interrupted as it should be.

    silence_s: silence that ends a turn.
    """

    def __init__(self, silence_s: float = 0.5):
        self.silence_s, self.every_s, self.chunks = silence_s, 0.1, 15
        self.now_s, self.sent = 0.0, list[dict[str, Any]]()
        self._due: list[tuple[float, int, dict[str, Any]]] = []
        self._order = itertools.count()
        self._speech, self._quiet_s, self._responses = False, 0.0, 0

    def send(self, data: str) -> None:
        event = json.loads(data)
        self.sent.append(event)
        if event["type"] == "session.update":
            self._schedule(0.0, "session.updated")
        elif event["type"] == "input_audio_buffer.append":
            self._hear(np.frombuffer(base64.b64decode(event["audio"]), "<i2"))

    def recv(self, timeout: float) -> str:
        if not self._due or self._due[0][0] > self.now_s + timeout:
            self.now_s += timeout
            raise TimeoutError
        at_s, _, event = heapq.heappop(self._due)
        self.now_s = max(self.now_s, at_s)
        return json.dumps(event)

    def _schedule(self, in_s: float, kind: str, **fields: Any) -> None:
        event = {"type": kind, **fields}
        heapq.heappush(self._due, (self.now_s + in_s, next(self._order), event))

    def _hear(self, samples: Any) -> None:
        if np.abs(samples).max() > 0:
            self._quiet_s = 0.0
            self._loud()
            return
        self._quiet_s += len(samples) / CALL_RATE
        if self._speech and self._quiet_s >= self.silence_s - 1e-6:
            self._speech = False
            self._answer()

    def _loud(self) -> None:
        speaks = bool(self._due)
        if self._speech:
            return
        self._speech = True
        if speaks:
            self._due.clear()
            self._done("cancelled")
        self._schedule(0.0, "input_audio_buffer.speech_started")

    def _answer(self) -> None:
        self._responses += 1
        name = {"response_id": str(self._responses)}
        self._schedule(0.0, "response.created", response={"id": name["response_id"]})
        self._schedule(
            FIRST_WORD_S, "response.output_audio_transcript.delta", delta="seven", **name
        )
        sound = base64.b64encode(bytes(round(2 * CHUNK_S * CALL_RATE))).decode()
        for number in range(self.chunks):
            in_s = FIRST_SAMPLE_S + number * self.every_s
            self._schedule(in_s, "response.output_audio.delta", delta=sound, **name)
        self._done("completed", FIRST_SAMPLE_S + self.chunks * self.every_s)

    def _done(self, status: str, in_s: float = 0.0) -> None:
        response = {"id": str(self._responses), "status": status}
        self._schedule(in_s, "response.done", response=response)


def judged(endpoint: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    call = Call(endpoint, piece_ms=round(PIECE_S * 1000), now=lambda: endpoint.now_s)
    rows, summary, headlines = realtime.judge(call, question(), OPTIONS)
    assert [one.unit for one in headlines] == ["s", "s", "s"]
    return rows, summary


def test_a_server_that_does_all_well() -> None:
    rows, summary = judged(Endpoint(silence_s=0.7))
    assert [row["kind"] for row in rows] == ["question", "pause", "pause", "interruption"]
    for row in rows:
        assert row["first_sample_s"] == pytest.approx(0.7 + FIRST_SAMPLE_S)
        assert row["first_word_s"] == pytest.approx(0.7 + FIRST_WORD_S)
    assert rows[-1]["silence_s"] == pytest.approx(PIECE_S)
    assert summary["first_sample_s"]["p50"] == pytest.approx(0.7 + FIRST_SAMPLE_S)
    assert summary["cut_offs"] == {"0": 0, "300": 0, "600": 0}
    assert counts(summary) == {"interruptions": 1}


def test_only_documented_events_are_sent() -> None:
    endpoint = Endpoint()
    judged(endpoint)
    for event in endpoint.sent:
        read = CLIENT_EVENT.validate_python(event)
        assert read.to_dict() == event
        if event["type"] == "session.update":
            assert not extra_fields(read)
    assert {event["type"] for event in endpoint.sent} == {
        "session.update",
        "input_audio_buffer.append",
    }


def counts(summary: dict[str, Any]) -> dict[str, int]:
    """Return the counts that are not 0, but the cut-offs."""
    names = ("interruptions", "not_silenced", "underruns", "unanswered")
    return {name: summary[name] for name in names if summary[name]}


def extra_fields(read: Any) -> dict[str, Any]:
    """Return the fields of an event that OpenAI's types do not have."""
    found = dict(read.model_extra or {})
    for value in vars(read).values():
        if isinstance(value, BaseModel):
            found |= extra_fields(value)
    return found


def answer_calls(socket: ServerConnection) -> None:
    """Serve one session: a chunk for each stretch of speech, and an error for a model named so."""
    heard = False
    for data in socket:
        event = json.loads(data)
        if event["type"] == "session.update":
            if "model=broken" in socket.request.path:  # type: ignore[union-attr]
                socket.send(json.dumps({"type": "error", "error": {"message": "It broke."}}))
            socket.send(json.dumps({"type": "session.updated"}))
            continue
        loud = any(base64.b64decode(event["audio"]))
        if heard and not loud:
            name = {"response_id": "1"}
            sound = base64.b64encode(bytes(960)).decode()
            for kind, fields in (
                ("response.created", {"response": {"id": "1"}}),
                ("response.output_audio_transcript.delta", {"delta": "red", **name}),
                ("response.output_audio.delta", {"delta": sound, **name}),
                ("response.done", {"response": {"id": "1", "status": "completed"}}),
            ):
                socket.send(json.dumps({"type": kind, **fields}))
        heard = loud


def test_an_endpoint_is_judged_by_its_address(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(realtime, "SENTENCE", ("six", "two"))
    monkeypatch.setattr(realtime, "LONG", "six")
    soundfile.write(tmp_path / "q.wav", question()[8000:12000], 16000)
    asked: list[Any] = []
    with serve(
        answer_calls, "127.0.0.1", 0, process_request=lambda _, request: asked.append(request)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"ws://127.0.0.1:{server.socket.getsockname()[1]}/v1/realtime"
        file = tmp_path / "r.json"
        arguments = ["--url", address, "--key", "sk-own", "--turns", "1", "--pauses-ms", "100"]
        arguments += ["--question", str(tmp_path / "q.wav")]
        assert realtime.main([*arguments, "--model", "gpt-realtime", "--json", str(file)]) == 0
        assert realtime.main([*arguments, "--model", "broken"]) == 1
    assert asked[0].path == "/v1/realtime?model=gpt-realtime"
    assert asked[0].headers["authorization"] == "Bearer sk-own"
    found = load_results(file)
    assert [row["kind"] for row in found.rows] == ["question", "pause", "interruption"]
    assert found.summary["unanswered"] == 0
    said = capsys.readouterr()
    assert "sk-own" not in file.read_text() + said.out
    assert "the server sent an error: It broke." in said.err


class Chat(BaseHTTPRequestHandler):
    """Answers each chat request by words, two chunks of sound, and the event of the usage."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, Any, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers, body))
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        sound = base64.b64encode(bytes(4800)).decode()
        audio = [{"transcript": "red"}, {"data": sound}, {"data": sound}]
        events: list[Any] = [
            {"choices": [{"delta": {"audio": part}, "finish_reason": None}]} for part in audio
        ]
        for event in (*events, {"choices": [], "usage": {}}):
            data = f"data: {json.dumps(event)}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


def test_a_chat_server_is_asked_by_its_address(tmp_path) -> None:
    Chat.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        file = tmp_path / "r.json"
        arguments = ["--url", f"http://{address}/base/v1", "--key", "sk-own", "--model", "m"]
        arguments += ["--clients", "1,2", "--requests", "1", "--rounds", "2", "--json", str(file)]
        assert serve_load.main(arguments) == 0
        server.shutdown()
    assert "sk-own" not in file.read_text()
    rows = load_results(file).rows
    assert [(row["way"], row["clients"], row["requests"]) for row in rows] == [
        ("url", 1, 2),
        ("url", 2, 4),
    ]
    assert all(row["ttft_s"]["p50"] > 0 < row["ttfb_s"]["p50"] for row in rows)
    for path, headers, body in Chat.asked:
        assert path == "/base/v1/chat/completions"
        assert headers["host"] == address
        assert headers["authorization"] == "Bearer sk-own"
        assert body.keys() <= CHAT_FIELDS
        assert body["model"] == "m"
