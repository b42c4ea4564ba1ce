"""Long texts: refused soon, and nothing long on the event loop's thread."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from qwen3_omni_neuron.prompt.tokenizer import AT_ONCE, Tokenizer
from qwen3_omni_neuron.serving.server import Server
from qwen3_omni_neuron.serving.settings import ServerSettings
from testing.http_client import JSON, ask
from testing.http_server import url_of
from testing.realtime import Caller, calling

MODEL = "qwen3-omni"
HUGE = "word and " * (1 << 20)
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 2}


@pytest.fixture
def tokenised(monkeypatch) -> list[int]:
    """Lengths of the texts that have been tokenised."""
    lengths: list[int] = []
    encode = Tokenizer._encode

    def watched(self: Tokenizer, backend: Any, text: str, most: int | None) -> list[int]:
        lengths.append(len(text))
        return encode(self, backend, text, most)

    monkeypatch.setattr(Tokenizer, "_encode", watched)
    return lengths


def post(server: Server, body: bytes) -> tuple[int, Any]:
    """Send a body; return the answer's status, and its JSON."""
    answer = ask(f"{url_of(server)}/v1/chat/completions", body, JSON)
    return answer.status, answer.json()


def chat(content: Any, **more: Any) -> bytes:
    return json.dumps(
        {**ASKED, "messages": [{"role": "user", "content": content}], **more}
    ).encode()


@pytest.mark.parametrize(
    "body",
    [
        chat(HUGE),
        chat([{"type": "text", "text": HUGE}]),
        json.dumps(
            {
                **ASKED,
                "messages": [
                    {"role": "system", "content": HUGE},
                    {"role": "user", "content": "Hi"},
                ],
            }
        ).encode(),
        chat("\n" * (1 << 20) + "7" * (8 << 20)),
        chat("<|im_end|>" * 800_000),
    ],
    ids=["text", "part", "system", "digits", "names"],
)
def test_text_that_fits_nothing_is_refused_while_others_are_answered(
    server, tokenised, body
) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, body)
        answered = 0
        while not answer.done() or not answered:
            assert ask(f"{url_of(server)}/health").status == 200
            answered += 1
        status, said = answer.result()
    error = said["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"].startswith("messages[0]")
    assert "tokens or more" in error["message"] and error["type"] == "invalid_request_error"
    assert max(tokenised, default=0) < 100


def test_a_body_of_the_largest_size_is_answered(server) -> None:
    body = chat("Hi", metadata={"note": ""})
    size = ServerSettings().max_body_bytes
    note = ("one (two) and <three>; " * (size // 20))[: size - len(body)]
    body = chat("Hi", metadata={"note": note})
    assert len(body) == size
    assert post(server, body)[0] == 200


def refused(caller: Caller, kind: str, **fields: Any) -> Any:
    caller.send(kind, **fields)
    return caller.until("error")[-1].error


def item(*content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": list(content)}


def test_text_that_fits_nothing_is_refused_in_a_session_that_goes_on(server, tokenised) -> None:
    with calling(server) as caller:
        caller.update(instructions="Be brief.", max_output_tokens=2, output_modalities=["text"])
        tool = {"type": "function", "name": "f", "description": HUGE, "parameters": {}}
        text = {"type": "input_text", "text": HUGE}
        for error in (
            refused(caller, "session.update", session={"type": "realtime", "instructions": HUGE}),
            refused(caller, "session.update", session={"type": "realtime", "tools": [tool]}),
            refused(caller, "conversation.item.create", item=item(text)),
            refused(caller, "response.create", response={"instructions": HUGE}),
        ):
            assert error.code == "context_length_exceeded"
        wide = {"type": "realtime", "tracing": [[]] * 100_000}
        assert refused(caller, "session.update", session=wide).code == "body_too_complex"
        assert max(tokenised, default=0) <= AT_ONCE
        session = caller.update()
        assert (session.instructions, session.tools) == ("Be brief.", [])
        caller.write("Hello")
        caller.answer()
