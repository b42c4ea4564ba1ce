"""Calls of tools held to their schemas, and calls that fail: in the API, chat, and realtime.

The tiny model's words are random. A script stands for the beginning of its reply; from there on the
model writes, within the grammar.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai
import pytest

from qwen3_omni_neuron import AudioChunk, Finished, Qwen3Omni, TextDelta
from qwen3_omni_neuron.errors import GrammarError, OptionError, ToolCallError
from qwen3_omni_neuron.runtime.buffers import TokenBuffer
from qwen3_omni_neuron.serving.server import Server
from testing.http_client import ask
from testing.http_server import url_of
from testing.realtime import PUSH_TO_TALK, calling

pytest.importorskip("llguidance", reason="the extra serve is not installed")
HELLO: Any = [{"role": "user", "content": "Hello"}]
LIMITS: dict[str, Any] = {"thinker_max_new_tokens": 150, "talker_max_new_tokens": 12, "seed": 4}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "東京"]}, "place": {"$ref": "#/$defs/place"}},
    "required": ["city", "place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("weather", PARAMETERS), tool("stop", EMPTY), tool("wait", EMPTY)]
NAMED = {"type": "function", "function": {"name": "weather"}}
CUT = "<tool_call>\n" + '{"name": "wea'


def allowed(mode: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in ("stop", "wait")]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture(autouse=True)
def template_with_tools(omni, monkeypatch) -> None:
    monkeypatch.setattr(omni.prompt_builder._template, "takes_tools", True)


@pytest.fixture
def script(omni, monkeypatch) -> Iterator[Callable[[Sequence[int]], None]]:
    """Gives the tokens that the next reply begins with, whatever the model would write."""
    stage = omni._pipeline._thinker
    sample, left = stage._sample_ids, list[int]()

    def scripted(samplers: Any, logits: Any) -> list[int]:
        return [left.pop(0) if left else token_id for token_id in sample(samplers, logits)]

    monkeypatch.setattr(stage, "_sample_ids", scripted)
    yield left.extend
    assert not left


def tokens(omni: Qwen3Omni, text: str) -> list[int]:
    """Return the ids of a text in which markers of calls are tokens."""
    return omni.prompt_builder._tokenizer.encode(text)


def calls_of(text: str) -> list[tuple[str, Any]]:
    """Return the calls of a text that has nothing else, checked against the schemas."""
    found = []
    for part in text.removesuffix("</tool_call>").split("</tool_call>\n"):
        call = json.loads(part.removeprefix("<tool_call>\n"))
        check(call["name"], call["arguments"])
        written = json.dumps(call, ensure_ascii=False)
        assert part.removesuffix("</tool_call>") == f"<tool_call>\n{written}\n"
        found.append((call["name"], call["arguments"]))
    return found


def check(name: str, arguments: Any) -> None:
    if name == "weather":
        assert list(arguments) == ["city", "place"] and arguments["city"] in ("Köln", "東京")
        assert len(arguments["place"]) <= 2 and {*arguments["place"]} <= {True, False}
    else:
        assert (name, arguments) in (("stop", {}), ("wait", {}))


@pytest.mark.parametrize("spelled", [False, True], ids=["a token", "spelled in words"])
def test_from_the_marker_on_a_call_is_held_to_its_schema_and_not_spoken(
    omni, monkeypatch, script, spelled
) -> None:
    spoken: list[int] = []
    put = TokenBuffer.put

    def put_and_note(buffer: TokenBuffer, token_id: int) -> None:
        spoken.append(token_id)
        put(buffer, token_id)

    monkeypatch.setattr(TokenBuffer, "put", put_and_note)
    encode = omni.prompt_builder.encode_words
    script(
        encode("Let me look. ") + (encode if spelled else lambda t: tokens(omni, t))("<tool_call>")
    )
    result = omni.generate_audio(HELLO, tools=TOOLS, parallel_tool_calls=False, **LIMITS)
    assert result.text.startswith("Let me look. <tool_call>\n")
    assert len(calls_of(result.text.removeprefix("Let me look. "))) == 1
    assert omni.prompt_builder.decode(spoken) == "Let me look. " and len(result.audio)
    assert result.thinker_finish_reason == "stop"


def test_several_calls_are_held_each_and_text_between_them_is_free(omni, script) -> None:
    one = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    script(tokens(omni, f"{one}\nand\n<tool_call>"))
    stream = omni.stream_text(HELLO, tools=TOOLS, **LIMITS)
    texts = [event.text for event in stream if isinstance(event, TextDelta)]
    first, second = "".join(texts).split("\nand\n")
    assert first == one and "".join(texts).count("<tool_call>") >= 2
    calls_of(second.partition("</tool_call>")[0] + "</tool_call>")


def test_a_choice_of_tools_is_a_call_of_one_of_them_from_the_first_token_on(omni) -> None:
    for choice, names, one in (
        ("required", {"weather", "stop", "wait"}, True),
        ("required", {"weather", "stop", "wait"}, False),
        (NAMED, {"weather"}, True),
        (allowed("required"), {"stop", "wait"}, False),
    ):
        for seed in range(3):
            options = {**LIMITS, "seed": seed, "thinker_max_new_tokens": 800}
            options |= {"thinker_do_sample": True, "thinker_temperature": 1e4, "thinker_top_k": 0}
            stream = omni.stream(
                HELLO, tools=TOOLS, tool_choice=choice, parallel_tool_calls=not one, **options
            )
            events = list(stream)
            assert not any(isinstance(event, AudioChunk) for event in events)
            (finished,) = [event for event in events if isinstance(event, Finished)]
            calls = calls_of(finished.result.text)
            assert {name for name, _ in calls} <= names
            assert not one or len(calls) == 1
            assert finished.result.talker_finish_reason == "no_speech"


def test_tools_that_are_not_allowed_are_not_called(omni, script) -> None:
    script(tokens(omni, "<tool_call>"))
    choice = allowed("auto")
    result = omni.generate_text(
        HELLO, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **LIMITS
    )
    assert calls_of(result.text)[0][0] in ("stop", "wait")


def test_a_grammar_beside_tools_allows_either(omni, script) -> None:
    options = {"tools": TOOLS, "grammar": {"regex": "(yes|no)"}, **LIMITS}
    for begun in ("y", "<tool_call>"):
        script(tokens(omni, begun))
        text = omni.generate_text(HELLO, parallel_tool_calls=False, **options).text
        assert text == "yes" if begun == "y" else len(calls_of(text)) == 1


def test_a_schema_that_is_not_strict_and_not_supported_is_any_object(omni, script) -> None:
    """A script that the grammar does not allow would end the reply with a GrammarError."""
    odd = {"type": "object", "properties": {"a": {"$ref": "http://localhost/a"}}}
    tools = [tool("odd", odd), tool("weather", PARAMETERS)]
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, **LIMITS}
    call = '<tool_call>\n{"name": "odd", "arguments": {"b": [1]}}\n</tool_call>'
    script(tokens(omni, call))
    assert omni.generate_text(HELLO, **options).text == call
    script(tokens(omni, call.partition('{"b"')[0] + "["))
    with pytest.raises(GrammarError):
        omni.generate_text(HELLO, **options)
    tools[0]["function"]["strict"] = True
    with pytest.raises(OptionError, match=r"tool 0 \(odd\): the schema is strict, and every"):
        omni.stream_text(HELLO, tools=tools, **LIMITS)


YES = {"const": True}
A: dict[str, Any] = {"type": "object", "properties": {"a": YES}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": YES}, "required": ["b"]}


@pytest.mark.parametrize(
    ("parameters", "arguments", "closed"),
    [
        (None, "{}", True),
        ({}, "{}", True),
        ({"properties": {"a": YES}, "required": ["a"]}, '{"a": true}', True),
        (A | {"type": ["object", "null"], "properties": {"a": A}}, '{"a": {"a": true}}', True),
        (
            A | {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": B}},
            '{"a": {"b": true}}',
            True,
        ),
        ({"anyOf": [A, {"$ref": "#/$defs/b"}], "$defs": {"b": B}}, '{"b": true}', True),
        # What describes one object together, or says that there are further keys, is as it was.
        ({"allOf": [A, B]}, '{"a": true, "b": true}', False),
        (A | {"anyOf": [B]}, '{"a": true, "b": true}', False),
        (A | {"additionalProperties": YES}, '{"a": true, "z": true}', False),
        ({"properties": [1], "required": [{}]}, '{"z": 1}', False),
        ({"type": "object", "required": ["z"]}, '{"z": 1}', False),
    ],
)
def test_arguments_are_an_object_of_the_keys_that_the_schema_names(
    omni, script, parameters, arguments, closed
) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": False, **LIMITS}
    options["tools"] = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    script(tokens(omni, call))
    assert omni.generate_text(HELLO, **options).text == call
    one_more = '{"' if arguments == "{}" else arguments.rstrip("}") + ","
    for other in ("t", one_more) if closed else ("t",):
        script(tokens(omni, call.partition(arguments)[0] + other))
        with pytest.raises(GrammarError):
            omni.generate_text(HELLO, **options)


def test_a_choice_that_can_not_be_made_is_refused(omni) -> None:
    for options, message in (
        ({"tool_choice": "always"}, "tool_choice must be auto, none, required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be"),
        ({"tool_choice": {"type": "mcp", "server_label": "a"}}, "tool_choice must be"),
        ({"tool_choice": NAMED | {"function": {"name": "no"}}}, "names 'no', but tools has 'weath"),
        ({"tool_choice": "required", "tools": []}, "requires a call, but tools is empty"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] has no function with a name"),
        (
            {"tools": [tool("f", {"properties": {str(n): {} for n in range(501)}})]},
            "501 properties",
        ),
    ):
        with pytest.raises(OptionError, match=message):
            omni.stream(HELLO, **{"tools": TOOLS, **LIMITS, **options})


@pytest.mark.parametrize("how", ["malformed", "left open by the model"])
def test_a_call_that_fails_is_an_error_and_nothing_of_it_is_passed_on(
    omni, monkeypatch, script, how
) -> None:
    options: dict[str, Any] = {"tools": TOOLS, **LIMITS}
    without_llguidance(monkeypatch)
    begun = tokens(omni, 'Hm. <tool_call>\n{"name": "stop"\n</tool_call>')
    if how == "left open by the model":
        begun = tokens(omni, "Hm. " + CUT + "<|im_end|>")
    for speak in (False, True):
        script(begun)
        events = []
        with (
            pytest.raises(ToolCallError, match="The call was dropped"),
            (omni.stream if speak else omni.stream_text)(HELLO, **options) as stream,
        ):
            events += list(iter(stream.__next__, None))
        texts = [event.text for event in events if isinstance(event, TextDelta)]
        assert "".join(texts) in ("Hm. ", "")
        assert omni.status().fault is None
    script(begun)
    with omni.session(messages=[*HELLO], **options) as session:
        session.append("And?")
        with pytest.raises(ToolCallError):
            list(session.respond(speak=False))
        assert "tool_call" not in json.dumps(session.messages)


def without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # an import of None raises ImportError


BODY = {name: value for name, value in LIMITS.items() if name != "seed"}


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), (NAMED, "stop"), (allowed("required"), "tool_calls")],
)
def test_a_chat_calls_the_tools_that_its_choice_allows(client, server, choice, reason) -> None:
    asked: Any = {"model": server.settings.model_name, "messages": HELLO, "tools": TOOLS, "seed": 4}
    asked |= {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": BODY}
    (whole,) = client.chat.completions.create(**asked).choices
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content) == (reason, None)
    check(call.function.name, json.loads(call.function.arguments))
    assert "\\u" not in call.function.arguments
    asked |= {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}}
    pieces = list(client.chat.completions.create(**asked, stream=True))
    deltas = [piece.choices[0].delta for piece in pieces]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [c.function.arguments for c in calls] == [call.function.arguments]
    assert pieces[-1].choices[0].finish_reason == reason
    assert not any(delta.to_dict().get("audio", {}).get("data") for delta in deltas)


def failed_calls(server: Server) -> float:
    text = ask(f"{url_of(server)}/metrics").body.decode()
    name = "qwen3_omni_tool_calls_failed_total "
    return float(next(x for x in text.splitlines() if x.startswith(name)).split()[1])


def test_a_call_that_fails_is_an_error_of_the_chat_and_counted(
    omni, client, server, monkeypatch, script
) -> None:
    without_llguidance(monkeypatch)
    before, begun = failed_calls(server), tokens(omni, 'Hm. <tool_call>\n{"name"\n</tool_call>')
    asked: Any = {"model": server.settings.model_name, "messages": HELLO, "tools": TOOLS}
    script(begun)
    with pytest.raises(openai.InternalServerError, match="not a JSON object") as failed:
        client.with_options(max_retries=0).chat.completions.create(**asked)
    assert failed.value.code == "tool_call_failed"
    script(begun)
    contents: list[str] = []
    with pytest.raises(openai.APIError, match="not a JSON object"):  # 500 if it comes first of all
        pieces = client.with_options(max_retries=0).chat.completions.create(**asked, stream=True)
        contents.extend(piece.choices[0].delta.content or "" for piece in pieces)
    assert "name" not in "".join(contents)
    assert failed_calls(server) == before + 2


WRITTEN = ' "weather", "arguments": {"city": "Köln", "place": ['


@pytest.mark.parametrize("written", ["", ' "weath', ' "weather", "arguments":', WRITTEN])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_a_call_that_the_limit_cuts_off_is_told_as_far_as_it_was_written(
    omni, client, server, script, choice, written
) -> None:
    said = "Hm. " if choice == "auto" else ""
    begun = tokens(omni, f'{said}<tool_call>\n{{"name":{written}')
    asked: Any = {"model": server.settings.model_name, "tools": TOOLS, "tool_choice": choice}
    asked["extra_body"] = {"thinker_max_new_tokens": len(begun)}
    call = ("weather", WRITTEN.partition(": ")[2]) if written == WRITTEN else None
    script(begun)
    (whole,) = client.chat.completions.create(**asked, messages=HELLO).choices
    calls = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()]
    assert (whole.finish_reason, calls) == ("length", [call] if call else [])
    assert (whole.message.content or "") == said
    script(begun)
    pieces = [
        p.choices[0] for p in client.chat.completions.create(**asked, messages=HELLO, stream=True)
    ]
    streamed = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    assert [(c.function.name, c.function.arguments) for c in streamed if c.function] == calls
    assert "".join(piece.delta.content or "" for piece in pieces) == said
    assert pieces[-1].finish_reason == "length"
    history = [*HELLO, whole.message.to_dict(), {"role": "tool", "content": "?"}, *HELLO]
    client.chat.completions.create(**asked | {"tool_choice": "none"}, messages=history)

    asked["tools"] = [{"type": "function", **one["function"]} for one in TOOLS]
    asked["tool_choice"] = {"type": "function", "name": "weather"} if choice == NAMED else choice
    script(begun)
    made = client.responses.create(**asked, input="Hello")
    script(begun)
    last = list(client.responses.create(**asked, input="Hello", stream=True))[-1]
    assert last.type == "response.incomplete"
    for response in (made, last.response):
        assert response.status == "incomplete" and response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == said
        found = [item for item in response.output if item.type == "function_call"]
        assert [(item.name, item.arguments) for item in found] == calls
        assert {item.status for item in found} <= {"incomplete"}
    client.responses.create(
        **asked | {"tool_choice": "none"}, input="Hi", previous_response_id=made.id
    )


def test_a_call_that_a_stop_string_cuts_off_is_not_told(omni, client, server, script) -> None:
    written = WRITTEN.removesuffix(": [")
    asked: Any = {"model": server.settings.model_name, "messages": HELLO, "tools": TOOLS}
    script(tokens(omni, f'<tool_call>\n{{"name":{written}'))
    (made,) = client.chat.completions.create(**asked, stop='"place"').choices
    assert (made.finish_reason, made.message.tool_calls) == ("stop", None)

    whole = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n'
    flat = [{"type": "function", **one["function"]} for one in TOOLS]
    for before in ("", whole):
        script(tokens(omni, f'{before}<tool_call>\n{{"name":{written}'))
        answer = client.responses.create(
            model=asked["model"], input="Hello", tools=flat, extra_body={"stop": ['"place"']}
        )
        kinds = [(item.type, item.status) for item in answer.output]
        kind = "function_call" if before else "message"
        assert (answer.status, kinds) == ("completed", [(kind, "completed")])
    script(tokens(omni, f'{whole}<tool_call>\n{{"name":{written}'))
    (made,) = client.chat.completions.create(**asked, stop='"place"').choices
    assert (made.finish_reason, len(made.message.tool_calls)) == ("tool_calls", 1)


SCHEMA = {"name": "place", "schema": PARAMETERS, "strict": True}


def test_a_chat_answers_in_the_json_of_its_format(client, server) -> None:
    asked: Any = {"model": server.settings.model_name, "messages": HELLO, "seed": 4}
    asked["extra_body"] = BODY
    form: Any = {"type": "json_schema", "json_schema": SCHEMA}
    content = client.chat.completions.create(**asked, response_format=form).choices[0].message
    check("weather", json.loads(content.content or ""))
    assert json.dumps(json.loads(content.content or ""), ensure_ascii=False) == content.content
    pieces = client.chat.completions.create(**asked, response_format=form, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == content.content
    asked["extra_body"] = {**BODY, "thinker_max_new_tokens": 12}
    made = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert (made.choices[0].message.content or "").startswith("{")


def test_a_format_that_can_not_be_kept_is_refused_before_the_answer(server) -> None:
    for fields, message in (
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA | {"name": "a b"}}},
            "name",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": SCHEMA | {"schema": {"type": "object", "properties": {"a": {}}}},
                }
            },
            "every object in it needs additionalProperties: false",
        ),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": SCHEMA},
                "grammar": {"regex": "a"},
            },
            "response_format or grammar, not both",
        ),
        ({"grammar": {"lark": "start: nothing"}}, "unknown name"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
    ):
        body = {"model": server.settings.model_name, "messages": HELLO, **fields}
        answer = ask(f"{url_of(server)}/v1/chat/completions", json.dumps(body).encode())
        assert answer.status == 400 and message in answer.json()["error"]["message"]


REALTIME_TOOLS = [{"type": "function", **one["function"]} for one in TOOLS]


def test_a_realtime_response_calls_the_tool_that_it_must_and_tells_a_cut_call(
    omni, server, script
) -> None:
    with calling(server) as caller:
        caller.update(audio=PUSH_TO_TALK, tools=REALTIME_TOOLS, parallel_tool_calls=False, **LIMITS)
        caller.write("Hello")
        events = caller.answer(tool_choice={"type": "function", "name": "weather"})
        (call,) = events[-1].response.output
        check(call.name, json.loads(call.arguments))
        assert call.name == "weather" and "\\u" not in call.arguments
        assert not [event for event in events if event.type == "response.output_audio.delta"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
        caller.send("conversation.item.create", item=result)
        begun = tokens(omni, f'Hm. <tool_call>\n{{"name":{WRITTEN}')
        script(begun)
        caller.send("response.create", response={"max_output_tokens": len(begun)})
        events = caller.until("response.done")
        cut = events[-1].response
        assert (cut.status, cut.status_details.reason) == ("incomplete", "max_output_tokens")
        said, call = cut.output
        assert said.content[0].transcript == "Hm. " and call.status == "incomplete"
        assert call.arguments == WRITTEN.partition(": ")[2]
        caller.write("And?")
        (again,) = caller.answer(tool_choice="required")[-1].response.output
        check(again.name, json.loads(again.arguments))
