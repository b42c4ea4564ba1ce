"""JSON is bounded in values, depth and escapes before it becomes objects."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3_omni_neuron.serving.openai import bodies
from qwen3_omni_neuron.serving.openai.bodies import (
    MOST_DEPTH,
    MOST_ESCAPES,
    MOST_MESSAGES,
    MOST_TOOLS,
    MOST_VALUES,
    check_json,
    parse_json,
)
from qwen3_omni_neuron.serving.openai.chat_request import ChatRequest
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.fields import Voices
from qwen3_omni_neuron.serving.realtime import events
from qwen3_omni_neuron.serving.realtime.events import (
    Base64,
    is_large,
    server_event,
)
from qwen3_omni_neuron.serving.realtime.session_config import (
    first_config,
    options_of,
    response_config,
    updated,
)

MIB = 1 << 20
strings = st.text() | st.sampled_from(
    ('"', "\\", "\\\\", '\\"', "[[,,{", "\n", "\u00e9", "\U0001f600")
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | strings,
    lambda inner: st.lists(inner) | st.dictionaries(strings, inner),
)


def chat(content: Any = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def complexity(value: Any) -> tuple[int, int]:
    """Return commas and openings, and how deep lists and objects are in each other."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [complexity(v) for v in (value.values() if isinstance(value, dict) else value)]
    count = 1 + max(0, len(inner) - 1) + sum(n for n, _ in inner)
    return count, 1 + max((depth for _, depth in inner), default=0)


@given(values, st.integers(1, 9), st.booleans(), st.booleans())
def test_values_and_depth_are_counted_outside_of_strings(
    value: Any, step_bytes: int, in_ascii: bool, indented: bool
) -> None:
    """At every limit, in steps of every size."""
    body = json.dumps(value, ensure_ascii=in_ascii, indent=2 if indented else None).encode()
    count, depth = complexity(value)
    limits = ((count, depth), (count - 1, depth), (count, depth - 1))
    for most_values, most_depth in limits if count else limits[:1]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bodies, "_STEP_BYTES", step_bytes)
            patch.setattr(bodies, "MOST_VALUES", max(most_values, body.count(b'"') // 4))
            patch.setattr(bodies, "MOST_DEPTH", most_depth)
            fits = count <= bodies.MOST_VALUES and depth <= most_depth
            if fits:
                check_json(body)
            else:
                with pytest.raises(ApiError):
                    check_json(body)


HOSTILE = {
    "values": (b'{"metadata": [' + b"[]," * (10 * MIB) + b"[]]}", "65536 values"),
    "numbers": (b"[" + b"1," * (15 * MIB) + b"1]", "65536 values"),
    "members": (b"{" + b'"a":1,' * (5 * MIB) + b'"b":1}', "65536 values"),
    "strings": (b"[" + b'"",' * (10 * MIB) + b'""]', "65536 values"),
    "quotes": (b'"' * (30 * MIB), "65536 values"),
    "depth": (b"[" * (30 * MIB), "64 lists and objects in each other"),
    "objects": (b'{"a":' * (6 * MIB), "64 lists and objects in each other"),
    "escapes": (b'["' + b"\\n" * (15 * MIB) + b'"]', "1048576 escapes"),
    "backslashes": (b'["' + b"\\" * (30 * MIB), "1048576 escapes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_too_complex_is_refused_before_it_becomes_objects(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, what = HOSTILE[name]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it becomes objects")

    monkeypatch.setattr(ChatRequest, "model_validate_json", refuse)
    monkeypatch.setattr(events.json, "loads", refuse)
    with pytest.raises(ApiError, match=f"the JSON has more than {what}") as refused:
        parse_json(ChatRequest, body)
    assert (refused.value.status, refused.value.code) == (400, "body_too_complex")
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(ApiError) as refused:
        events.parse_event(body.decode())
    assert refused.value.code == "body_too_complex"


def test_no_more_is_looked_at_than_what_is_too_much() -> None:
    class Body(bytes):
        furthest = 0

        def __getitem__(self, part: Any) -> Any:
            Body.furthest = max(Body.furthest, part.stop)
            return super().__getitem__(part)

    with pytest.raises(ApiError):
        check_json(Body(HOSTILE["values"][0]))
    assert Body.furthest < MIB
    Body.furthest = 0
    check_json(Body(b"]" * MIB))  # which no parser goes on behind
    assert Body.furthest < MIB


@pytest.mark.parametrize(
    "content",
    [
        "A" * (24 * MIB),
        "one, two [three] {four} " * 100_000,
        'She said: "\\no, no\\"\n' * 100_000,
        "\u5929" * 500_000,
        "\\" * 400_000,
    ],
    ids=["base64", "brackets", "quotes", "unicode", "backslashes"],
)
def test_a_long_text_is_one_value(content: str) -> None:
    body = json.dumps(chat(content)).encode()
    assert parse_json(ChatRequest, body).messages[0].content == content
    event = {"type": "input_audio_buffer.append", "audio": content}
    assert events.parse_event(json.dumps(event)) == event


def test_a_body_at_every_limit_is_read() -> None:
    check_json(b"[" * MOST_DEPTH + b"]" * MOST_DEPTH)
    check_json(b"[" + b"1," * (MOST_VALUES - 1) + b"1]")
    check_json(b'["' + b"\\n" * MOST_ESCAPES + b'"]')
    parts = [{"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": parts}] * MOST_MESSAGES
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] * MOST_TOOLS
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    assert len(parse_json(ChatRequest, body).messages) == MOST_MESSAGES
    check_json(b"")
    for wrong in (b"]", b'{"metadata": {"a": NaN}}', b'{"metadata": [Infinity, -Infinity]}'):
        with pytest.raises(ApiError, match="the body is not JSON"):
            parse_json(ChatRequest, wrong)


FUNCTION: Any = {"type": "function", "function": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
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
    ],
)
def test_more_of_a_kind_than_anybody_needs_are_refused(body: Any, field: str) -> None:
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
