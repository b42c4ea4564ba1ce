"""JSON is bounded in values and escapes before it becomes objects, and in depth."""

import json
from typing import Any

import pytest

from qwen3_omni_neuron.events import TextDelta
from qwen3_omni_neuron.serving.json_bytes import to_json
from qwen3_omni_neuron.serving.openai import bodies
from qwen3_omni_neuron.serving.openai.bodies import (
    MOST_ESCAPES,
    MOST_MESSAGES,
    MOST_TOOLS,
    MOST_VALUES,
    parse_json,
    read_json,
)
from qwen3_omni_neuron.serving.openai.chat_request import ChatRequest
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.fields import Voices
from qwen3_omni_neuron.serving.openai.reply import token_logprobs
from qwen3_omni_neuron.serving.realtime import events
from qwen3_omni_neuron.serving.realtime.events import Base64, is_large, server_event
from qwen3_omni_neuron.serving.realtime.session_config import (
    first_config,
    options_of,
    response_config,
    updated,
)

MIB = 1 << 20


def chat(content: Any = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


HOSTILE = {
    "values": (b'{"metadata": [' + b"[]," * (10 * MIB) + b"[]]}", "131072 values"),
    "numbers": (b"[" + b"1," * (15 * MIB) + b"1]", "131072 values"),
    "members": (b"{" + b'"a":1,' * (5 * MIB) + b'"b":1}', "131072 values"),
    "depth": (b"[" * (30 * MIB), "131072 values"),
    "little depth": (b"[" * 5000, "recursion limit exceeded"),
    "objects": (b'{"a":' * 5000, "recursion limit exceeded"),
    "escapes": (b'["' + b"\\n" * (15 * MIB) + b'"]', "1048576 escapes"),
    "backslashes": (b'["' + b"\\" * (30 * MIB), "1048576 escapes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_too_complex_is_refused(name, monkeypatch) -> None:
    """A long text is refused before it becomes objects."""
    body, what = HOSTILE[name]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it becomes objects")

    if len(body) > MIB:
        monkeypatch.setattr(bodies, "from_json", refuse)
    with pytest.raises(ApiError, match=what) as refused:
        parse_json(ChatRequest, body)
    assert (refused.value.status, refused.value.code) == (400, "body_too_complex")
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(ApiError, match=what) as refused:
        events.parse_event(body.decode())
    assert refused.value.code == "body_too_complex"


def test_a_long_text_is_read() -> None:
    for content in (
        "A" * (24 * MIB),
        "one, two [three] {four} " * 40_000,
        'She said: "\\no, no\\"\n' * 100_000,
        "\u5929" * 500_000,
        "\\" * 400_000,
    ):
        body = json.dumps(chat(content)).encode()
        assert parse_json(ChatRequest, body).messages[0].content == content
        event = {"type": "input_audio_buffer.append", "audio": content}
        assert events.parse_event(json.dumps(event)) == event


def test_a_body_at_every_limit_is_read() -> None:
    read_json(b"[" + b"1," * (MOST_VALUES - 1) + b"1]", "body")
    read_json(b'["' + b"\\n" * MOST_ESCAPES + b'"]', "body")
    parts = [{"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": parts}] * MOST_MESSAGES
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] * MOST_TOOLS
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    assert len(parse_json(ChatRequest, body).messages) == MOST_MESSAGES
    for wrong in (b"", b"]", b'{"metadata": {"a": NaN}}', b'{"metadata": [Infinity, -Infinity]}'):
        with pytest.raises(ApiError, match="the body is not JSON"):
            parse_json(ChatRequest, wrong)


FUNCTION: Any = {"type": "function", "function": {"name": "f", "arguments": ""}}


def test_more_of_a_kind_than_anybody_needs_are_refused() -> None:
    for body, field in (
        (chat() | {"messages": chat()["messages"] * (MOST_MESSAGES + 1)}, "messages"),
        (chat(tools=[FUNCTION] * (MOST_TOOLS + 1)), "tools"),
        (
            {
                "model": "m",
                "messages": [
                    {"role": "assistant", "tool_calls": [FUNCTION | {"id": "a"}] * (MOST_TOOLS + 1)}
                ],
            },
            "messages[0].tool_calls",
        ),
    ):
        with pytest.raises(ApiError, match="at most") as refused:
            parse_json(ChatRequest, json.dumps(body).encode())
        assert str(refused.value.param).startswith(field)


def test_a_session_and_a_response_have_the_same_bounds() -> None:
    voices = Voices(("Ethan",))
    config = first_config("m", voices)
    tools = [{"type": "function", "name": "f"}] * MOST_TOOLS
    assert len(options_of(updated(config, {"tools": tools}, voices))["tools"]) == MOST_TOOLS
    for asked, param in (
        ({"tools": [*tools, tools[0]]}, "response.tools"),
        ({"input": [{}] * (MOST_MESSAGES + 1)}, "response.input"),
        ({"metadata": {"a" * 65: "b"}}, "response.metadata"),
        ({"metadata": {"a": "b" * 513}}, "response.metadata"),
    ):
        with pytest.raises(ApiError) as refused:
            response_config(asked, voices)
        assert str(refused.value.param).startswith(param)
    response_config({"metadata": {"a" * 64: "b" * 512}}, voices)


def test_base64_is_written_as_any_other_text() -> None:
    def item(text: Any) -> dict[str, Any]:
        parts = [{"audio": text(sound), "transcript": said} for sound, said in content]
        return {"content": parts, "last": None}

    content = [("AAAA", "a \ud800"), ("", '"base64_"'), ("/+8=", "\n")]
    written = json.loads(server_event("kind", item=item(Base64)))
    assert written == {"type": "kind", "event_id": written["event_id"], "item": item(str)}
    assert list(written) == ["type", "event_id", "item"]
    assert is_large({"item": item(lambda _: Base64("A" * (1 << 20)))})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_no_json_has_nan_or_infinity(number) -> None:
    """A client's event with one is refused: the server would send it back."""
    assert to_json({"logprob": number}) == b'{"logprob":null}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        events.server_event("error", number=number)
    with pytest.raises(ApiError) as refused:
        events.parse_event(json.dumps({"type": "session.update", "temperature": number}))
    assert refused.value.code == "invalid_json"
    delta = TextDelta("a", [1], [-0.5], [[(2, float("-inf"))]])
    ((other,),) = (entry["top_logprobs"] for entry in token_logprobs(delta, lambda _: b"a"))
    assert other["logprob"] == -9999.0
