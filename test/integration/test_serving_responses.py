"""POST /v1/responses: OpenAI's other format of a conversation, over the same replies as chat."""

import base64
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from qwen3_omni_neuron.errors import LateError
from qwen3_omni_neuron.serving.openai.fields import INPUT_ITEMS, LOGPROBS
from qwen3_omni_neuron.serving.server import Server
from testing.http_client import ask
from testing.http_server import client_of, serving, url_of, wait_until
from testing.media_cases import QUESTION_WAV, noise_image
from testing.scripted_model import ScriptedModel

MODEL = "qwen3-omni"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@contextmanager
def scripted(
    texts: Sequence[str] = ("Hi",), speakers: Sequence[str] = (), **more: Any
) -> Iterator[tuple[ScriptedModel, OpenAI, Server]]:
    """Serve a model whose replies are these texts. The client has the first key."""
    key = more.get("api_keys", ("none",))[0]
    of_model = {name: more.pop(name) for name in ("thinks", "raises") if name in more}
    model = ScriptedModel(texts, tuple(speakers), **of_model)
    with serving(model, **more) as server, client_of(server, key) as client:  # type: ignore[arg-type]
        yield model, client, server


@pytest.fixture(scope="module")
def unasked() -> Iterator[tuple[ScriptedModel, Server]]:
    """A server whose requests are all refused."""
    with scripted() as (model, _, server):
        yield model, server


def events_of(client: OpenAI, **asked: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed response, each checked as OpenAI's client has its type."""
    events = []
    with client.responses.with_streaming_response.create(**asked, stream=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for block in answer.read().decode().strip().split("\n\n"):
            first, second = block.split("\n")
            event = json.loads(second.removeprefix("data: "))
            assert first == f"event: {event['type']}"
            EVENTS.validate_python(event)
            events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_response_has_openais_shape() -> None:
    with scripted(["One ", "two."]) as (model, client, _):
        asked: Any = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5}
        made = client.responses.create(model="gpt-5", input="Hello", max_output_tokens=9, **asked)
    Response.model_validate(made.to_dict())
    assert made.output_text == "One two."
    (item,) = made.output
    assert item.type == "message" and item.id.startswith("msg_") and len(item.id) == 4 + 32
    assert made.id.startswith("resp_") and len(made.id) == 5 + 32
    assert (item.role, item.status, made.status) == ("assistant", "completed", "completed")
    assert (made.model, made.instructions, made.metadata) == (MODEL, "Be brief.", {"a": "b"})
    assert made.usage is not None and made.usage.input_tokens == 7
    assert (made.usage.output_tokens, made.usage.total_tokens) == (2, 9)
    messages, options = model.asked[0]
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    assert messages == [system, user]
    assert options["thinker_max_new_tokens"] == 9 and options["thinker_temperature"] == 0.5


@pytest.mark.parametrize("stream", [False, True])
def test_text_reasoning_and_calls_are_items_in_their_order(stream) -> None:
    text = f"Let me see.</think>\n\nI add.\n{CALL}\n{CALL}\nDone."
    texts = [text[i : i + 5] for i in range(0, len(text), 5)]
    asked: Any = {"model": MODEL, "input": "Hello", "tools": [TOOL]}
    with scripted(texts, thinks=True) as (model, client, _):
        if stream:
            with client.responses.stream(**asked) as events:
                made: Any = events.get_final_response()
        else:
            made = client.responses.create(**asked)
            Response.model_validate(made.to_dict())
    reasoning, said, first, second, last = made.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Let me see.")
    assert (said.type, said.content[0].text, last.content[0].text) == (
        "message",
        "I add.\n",
        "Done.",
    )
    for call in (first, second):
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call",
            "add",
            {"a": 1},
        )
    assert len({item.id for item in made.output}) == 5 and first.call_id != second.call_id
    assert {item.status for item in made.output} == {"completed"}
    assert made.tools[0].to_dict()["name"] == "add"
    assert made.usage.output_tokens_details.reasoning_tokens == 3
    function = {"name": "add", "parameters": {"type": "object"}, "strict": False}
    assert model.asked[0][1]["tools"] == [{"type": "function", "function": function}]


def test_a_stream_has_every_event_in_its_order() -> None:
    with scripted(["One ", f"two.{CALL}"]) as (_, client, _):
        events = events_of(client, model=MODEL, input="Hello", tools=[TOOL], metadata={"a": "b"})
    message = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    kinds = ["created", "in_progress", "output_item.added", *message, "output_item.done"]
    kinds += ["output_item.added", *call, "output_item.done", "completed"]
    assert [event["type"].removeprefix("response.") for event in events] == kinds
    created, completed = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert (completed["id"], completed["metadata"]) == (created["id"], {"a": "b"})
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [item["status"] for item in added] == ["in_progress"] * 2
    assert done == completed["output"]
    assert added[0] == {**done[0], "status": "in_progress", "content": []}
    assert added[1] == {**done[1], "status": "in_progress", "arguments": ""}
    deltas = [e for e in events if e["type"].endswith("delta")]
    assert [e["delta"] for e in deltas] == ["One two.", '{"a": 1}']
    assert [(e["item_id"], e["output_index"]) for e in deltas] == [
        (item["id"], i) for i, item in enumerate(done)
    ]


def test_two_turns_with_a_call_of_a_tool() -> None:
    with scripted([f"I add.\n{CALL}"], thinks=False) as (model, client, _):
        asked: Any = {"model": MODEL, "tools": [TOOL], "instructions": "Be brief."}
        first = client.responses.create(**asked, input="What is 1 + 2?")
        said, call = first.output
        assert said.type == "message" and call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        question: Any = {"role": "user", "content": "What is 1 + 2?"}
        client.responses.create(**asked, previous_response_id=first.id, input=[result])
        sent: Any = [question, *(item.to_dict() for item in first.output), result]
        client.responses.create(**asked, input=sent)
        referred: Any = [question, {"type": "item_reference", "id": said.id}, call.to_dict()]
        done: Any = {**result, "status": "completed"}
        client.responses.create(**asked, input=[*referred, done])
        plain: Any = {"type": None, "role": "assistant", "content": "I add.\n"}
        bare = {"type": "function_call", "call_id": call.call_id, "name": "add"}
        parts: Any = [{"type": "input_text", "text": "What is 1 + 2?"}]
        asked["input"] = [{"type": "message", "role": "user", "content": parts}, plain]
        asked["input"] += [{**bare, "arguments": call.arguments}, result]
        client.responses.create(**asked)
    turns = [messages for messages, _ in model.asked[1:]]
    function = {"name": "add", "arguments": '{"a": 1}'}
    for i, turn in enumerate(turns):
        system, user, assistant, tool = turn
        assert system == {"role": "system", "content": "Be brief."}
        assert user["role"] == "user" and user["content"] in (
            "What is 1 + 2?",
            [{"type": "text", "text": "What is 1 + 2?"}],
        ), i
        assert (assistant["role"], assistant["content"]) == ("assistant", "I add.\n")
        named = {"id": call.call_id, "type": "function", "function": function}
        assert assistant["tool_calls"] == [named]
        assert (tool["role"], tool["content"], tool["tool_call_id"]) == ("tool", "3", call.call_id)


def test_a_call_has_the_namespace_that_its_function_is_in() -> None:
    function = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    space = {"type": "namespace", "name": "mcp__sums", "description": "Sums", "tools": [function]}
    tools: Any = [{"type": "web_search"}, {"type": "custom", "name": "patch"}, space]
    with scripted([CALL.replace("add", "mcp__sums__add")], thinks=False) as (model, client, server):
        asked: Any = {"model": MODEL, "tools": tools, "input": "What is 1 + 2?"}
        first = client.responses.create(**asked)
        (call,) = first.output
        assert (call.type, call.name, call.namespace) == ("function_call", "add", "mcp__sums")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        asked |= {"input": [result], "previous_response_id": first.id}
        assert [*client.responses.create(**asked, stream=True)][-1].type == "response.completed"
        messages, options = model.asked[-1]
        (said,) = [one["tool_calls"] for one in messages if one["role"] == "assistant"]
        assert said[0]["function"]["name"] == "mcp__sums__add"
        assert [tool["function"]["name"] for tool in options["tools"]] == ["mcp__sums__add"]
        labels = {"path": "/v1/responses", "field": "tools[]"}
        counted = server.service.metrics.registry.get_sample_value
        assert counted("qwen3_omni_fields_without_effect_total", labels) == 4


def test_a_conversation_continues_by_ids_alone() -> None:
    with scripted(["Yes."]) as (model, client, server):
        previous, asked = None, list[str]()
        for words in ("One?", "Two?", "Three?"):
            asked.append(words)
            made = client.responses.create(
                model=MODEL, input=words, previous_response_id=previous, instructions=f"Say {words}"
            )
            assert made.previous_response_id == previous
            previous = made.id
            messages, _ = model.asked[-1]
            assert messages[0] == {"role": "system", "content": f"Say {words}"}  # not the earlier
            turns = [m["content"] for m in messages[1:] if m["role"] == "user"]
            assert turns == asked and len(messages) == 2 * len(asked)
        assert previous is not None
        kept = client.responses.retrieve(previous)
        assert kept == made
        assert server.service.held.taken == server.service.responses.bytes_held > 0
        middle = kept.previous_response_id
        assert middle is not None
        client.responses.delete(middle)
        for call in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="not stored"):
                call(middle)
        for name in (middle, previous):  # the end of what has lost its middle
            with pytest.raises(openai.BadRequestError, match="Send the whole") as refused:
                client.responses.create(model=MODEL, input="Hi", previous_response_id=name)
            assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.BadRequestError, match="can't be streamed again"):
            list(client.responses.retrieve(previous, stream=True))
        with pytest.raises(openai.BadRequestError, match="Did you mean include") as refused:
            client.responses.retrieve(previous, extra_query={"includes": "all"})
        assert refused.value.param == "includes"
        reasoning: Any = ["reasoning.encrypted_content"]
        assert client.responses.retrieve(previous, include=reasoning) == made
        labels = {"path": "/v1/responses/{response_id}", "field": "include"}
        counted = server.service.metrics.registry.get_sample_value
        assert counted("qwen3_omni_fields_without_effect_total", labels) == 1


def test_the_items_that_a_response_has_answered_are_listed() -> None:
    call: Any = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c", "output": "3", "id": "fco_mine"}
    items: Any = [
        {"role": "developer", "content": "Be brief.", "id": "mine"},
        {"role": "assistant", "content": "Hello."},
        {"type": None, "role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        *(call, result, {"role": "user", "content": "Hi", "id": "mine"}),
    ]
    with scripted(["Yes."]) as (_, client, server):
        first = client.responses.create(model=MODEL, input=items, instructions="Not an item.")
        second = client.responses.create(
            model=MODEL, input="Sure?", previous_response_id=first.id, store=True
        )
        third = client.responses.create(model=MODEL, previous_response_id=second.id)
        listing = client.responses.input_items.list
        asked = listing(second.id, order="asc").data
        for item in asked:
            ITEM.validate_python(item.to_dict())
        told: Any = [item.to_dict() for item in asked]
        assert [item["type"] for item in told] == [
            *["message"] * 3,
            *("function_call", "function_call_output", "message", "message", "message"),
        ]
        assert {item["status"] for item in told} == {"completed"}
        texts = [part["text"] for item in told for part in item.get("content", ())]
        assert texts == ["Be brief.", "Hello.", "1 + 2?", "Hi", "Yes.", "Sure?"]
        ids = [item["id"] for item in told]
        assert (ids[0], ids[4], ids[6]) == ("mine", "fco_mine", first.output[0].id)
        assert len({*ids}) == len(ids)
        assert [item.id for item in listing(second.id)] == ids[::-1]
        assert [item.id for item in listing(third.id, order="asc")] == [*ids, second.output[0].id]

        page = listing(second.id, limit=3)
        assert page.to_dict()["has_more"] and page.to_dict()["first_id"] == ids[-1]
        assert [item.id for item in page] == ids[::-1]  # its iterator asks for the further pages
        end: Any = listing(second.id, after=ids[0]).to_dict()
        assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)
        wrong: Any
        for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_0"}):
            with pytest.raises(openai.BadRequestError) as refused:
                listing(second.id, **wrong)
            assert refused.value.param == next(iter(wrong))
        with pytest.raises(openai.BadRequestError, match=r"oder: .* Did you mean order\?"):
            listing(second.id, extra_query={"oder": "asc"})
        assert listing(second.id, include=[LOGPROBS]).data == listing(second.id).data
        counted = server.service.metrics.without_effect._metrics
        assert counted[INPUT_ITEMS, "include"]._value.get() == 1
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not stored"):
            listing(second.id)
        wait_until(lambda: server.service.held.taken == server.service.responses.bytes_held)


def test_items_that_share_an_id_are_all_listed_and_one_that_is_sent_back_is_there_once() -> None:
    with scripted(["Yes."]) as (_, client, _):
        asked: Any = {"role": "user", "content": "One?", "id": "msg_1"}
        first = client.responses.create(model=MODEL, input=[asked])
        again: Any = [first.output[0].to_dict(), {**asked, "content": "Two?"}]
        more: Any = {"model": MODEL, "previous_response_id": first.id}
        second = client.responses.create(**more, input=again)
        more["previous_response_id"] = second.id
        shorter: Any = {"type": "message", "role": "assistant", "id": first.output[0].id}
        shorter["content"] = [{"type": "output_text", "text": "Yes."}]
        third = client.responses.create(**more, input=[shorter, {**asked, "content": "3?"}])
        told: Any = list(client.responses.input_items.list(third.id, order="asc", limit=2))
        said = [(item.id, item.content[0].text) for item in told]
    assert said == [
        *(("msg_1", "One?"), (first.output[0].id, "Yes."), ("msg_1_2", "Two?")),
        *((second.output[0].id, "Yes."), ("msg_1_3", "3?")),
    ]


def test_nothing_is_kept_where_the_client_says_so() -> None:
    with scripted() as (_, client, server):
        made = client.responses.create(model=MODEL, input="Hi", store=False)
        assert made.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="store: false"):
            reference: Any = {"type": "item_reference", "id": made.output[0].id}
            client.responses.create(model=MODEL, input=[reference])
        assert server.service.held.taken == server.service.responses.bytes_held == 0


def test_another_key_can_not_name_a_response() -> None:
    with scripted(api_keys=("one", "two")) as (_, one, server), client_of(server, "two") as two:
        made = one.responses.create(model=MODEL, input="A secret")
        asked: Any = {"model": MODEL, "input": "What was it?"}
        with pytest.raises(openai.BadRequestError, match="not stored"):
            two.responses.create(**asked, previous_response_id=made.id)
        with pytest.raises(openai.BadRequestError, match="not stored"):
            reference: Any = {"type": "item_reference", "id": made.output[0].id}
            two.responses.create(model=MODEL, input=[reference])
        for call in (two.responses.retrieve, two.responses.delete, two.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        one.responses.create(**asked, previous_response_id=made.id)


def test_media_are_those_of_a_chat(omni, client) -> None:
    wav, picture = QUESTION_WAV.read_bytes(), io.BytesIO()
    noise_image(64, 96).save(picture, "PNG")
    clip = {"data": base64.b64encode(wav).decode(), "format": "wav"}
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    sound: Any = {"type": "input_audio", "input_audio": clip}
    content: Any = [sound, {"type": "input_image", "image_url": url, "detail": "auto"}]
    content.append({"type": "input_text", "text": "What is it?"})
    limit: Any = {"model": MODEL, "max_output_tokens": 8, "extra_body": {"seed": 3}}
    first = client.responses.create(**limit, input=[{"role": "user", "content": content}])
    items: Any = [{"type": "audio", "audio": wav}, {"type": "image", "image": picture.getvalue()}]
    items.append({"type": "text", "text": "What is it?"})
    turns: Any = [{"role": "user", "content": items}]
    options: Any = {"seed": 3, "thinker_max_new_tokens": 8}
    result = omni.generate_text(turns, **options)
    assert first.output_text == result.text
    assert first.usage and first.usage.input_tokens == result.timings.prompt_tokens
    details = first.usage.input_tokens_details.to_dict()
    assert details["audio_tokens"] == result.timings.prompt_audio_tokens > 0
    assert details["image_tokens"] == result.timings.prompt_image_tokens > 0
    turns += [{"role": "assistant", "content": result.text}, {"role": "user", "content": "Sure?"}]
    second = client.responses.create(**limit, input="Sure?", previous_response_id=first.id)
    result = omni.generate_text(turns, **options)
    assert second.output_text == result.text
    assert second.usage and second.usage.input_tokens == result.timings.prompt_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_without_a_limit_a_reply_may_fill_the_context(client) -> None:
    """`incomplete` is an error to several clients."""
    with scripted() as (model, other, _):
        other.responses.create(model=MODEL, input="Hi")
        other.responses.create(model=MODEL, input="Hi", extra_body={"thinker_max_new_tokens": 7})
        limits = [options["thinker_max_new_tokens"] for _, options in model.asked]
        more: Any = {"ignore_eos": True, "min_tokens": 2, "top_k": 3, "n": 1, "logprobs": False}
        other.responses.create(model=MODEL, input="Hi", extra_body=more)  # as load tools do
        assert model.asked[-1][1]["ignore_eos"] is True
        assert model.asked[-1][1]["thinker_top_k"] == 3
    assert limits == [4096, 7]
    made = client.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
    assert made.status == "incomplete" and made.output[0].to_dict()["status"] == "incomplete"
    assert made.incomplete_details and made.incomplete_details.reason == "max_output_tokens"
    assert made.usage and made.usage.output_tokens == 3


def test_an_error_has_a_status_before_the_first_word_and_is_an_event_after_it() -> None:
    for texts in ([], ["Hi"]):
        error = LateError("late.")
        with scripted(texts, raises=error) as (_, client, server):
            with pytest.raises(openai.InternalServerError) as failed:
                client.responses.create(model=MODEL, input="Hello")
            assert failed.value.status_code == 503
            if not texts:
                with pytest.raises(openai.InternalServerError):
                    client.responses.create(model=MODEL, input="Hello", stream=True)
            else:
                last = events_of(client, model=MODEL, input="Hello")[-1]
                assert last["type"] == "response.failed"
                made = last["response"]
                assert (made["status"], made["usage"]) == ("failed", None)
                said = {"code": "server_error", "message": "late.", "type": "timeout"}
                assert made["error"] == said
                assert made["output"][0]["status"] == "incomplete"
                with pytest.raises(openai.NotFoundError):
                    client.responses.retrieve(made["id"])
            assert server.service.held.taken == 0


def test_log_probabilities_are_those_of_a_chat(client) -> None:
    seed = {"seed": 3}
    asked: Any = {"model": MODEL, "temperature": 1.0, "top_logprobs": 2, "extra_body": seed}
    hello: Any = [{"role": "user", "content": "Hello"}]
    (chat,) = client.chat.completions.create(
        **asked, logprobs=True, messages=hello, max_tokens=9
    ).choices
    assert chat.logprobs is not None and chat.logprobs.content is not None
    wanted = [one.to_dict() for one in chat.logprobs.content]
    asked |= {"max_output_tokens": 9, "input": "Hello", "include": [LOGPROBS]}
    made = client.responses.create(**asked)
    Response.model_validate(made.to_dict())
    (item,) = made.output
    assert item.type == "message" and item.content[0].type == "output_text"
    assert [one.to_dict() for one in item.content[0].logprobs or ()] == wanted != []
    assert made.top_logprobs == 2

    events = events_of(client, **asked)
    short = [
        {
            **{"token": one["token"], "logprob": one["logprob"]},
            "top_logprobs": [
                {"token": other["token"], "logprob": other["logprob"]}
                for other in one["top_logprobs"]  # type: ignore[attr-defined]
            ],
        }
        for one in wanted
    ]
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    (done,) = [e["logprobs"] for e in events if e["type"] == "response.output_text.done"]
    assert [one for delta in deltas for one in delta] == done == short
    (part,) = [e["part"] for e in events if e["type"] == "response.content_part.done"]
    assert (
        part["logprobs"] == wanted == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    )

    assert client.responses.retrieve(made.id) == made
    del asked["include"], asked["top_logprobs"]
    bare = client.responses.create(**asked, previous_response_id=made.id)
    (item,) = bare.output
    assert item.type == "message" and item.content[0].to_dict()["logprobs"] == []
    (_, said, _) = client.responses.input_items.list(bare.id).data
    assert said.to_dict()["content"][0]["logprobs"] == []  # type: ignore[index, call-overload]


class Answers(BaseModel):
    """Form of a structured output."""

    first: bool
    rest: list[bool]


def test_structured_output_is_held_to_its_schema(client) -> None:
    pytest.importorskip("llguidance", reason="the extra serve is not installed")
    more: Any = {"model": MODEL, "input": "Go on", "extra_body": {"seed": 1}}
    parsed = client.responses.parse(**more, text_format=Answers, max_output_tokens=200)
    assert parsed.output_parsed is not None
    form = parsed.to_dict()["text"]
    assert isinstance(form, dict) and form["format"]["name"] == "Answers"
    free = client.responses.create(**more, text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(free.output_text), dict)


NAMED = {"type": "function", "name": "add"}
CHAT_NAMED = {"type": "function", "function": {"name": "add"}}


def test_tool_choice_and_formats_reach_the_model() -> None:
    for choice, reached in (
        ("required", "required"),
        (NAMED, CHAT_NAMED),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [NAMED]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHAT_NAMED]}},
        ),
    ):
        form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": False}
        asked: Any = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        asked["text"] = {"format": form}
        with scripted() as (model, client, _):
            made = client.responses.create(model=MODEL, input="Hi", **asked)
        _, options = model.asked[0]
        assert (options["tool_choice"], options["parallel_tool_calls"]) == (reached, False)
        assert options["grammar"] == {"json": {"type": "object"}, "strict": False}
        sent: Any = made.to_dict()
        assert (sent["tool_choice"], sent["parallel_tool_calls"]) == (choice, False)
        assert sent["text"]["format"]["schema"] == {"type": "object"}


def test_what_clients_send_by_default_is_taken() -> None:
    """Nulls, empty lists and what only the models of OpenAI have: see docs/serving.md."""
    nothing = [
        *("include", "instructions", "max_output_tokens", "metadata", "previous_response_id"),
        *("user", "background", "conversation", "prompt", "context_management", "stop"),
        *("temperature", "top_p", "tools", "tool_choice", "text", "truncation", "reasoning"),
    ]
    hello = {"type": "message", "role": "user", "content": "Hi"}
    bodies: list[dict[str, Any]] = [
        {"model": MODEL, "input": "Hi", **dict.fromkeys(nothing)},
        {"input": [hello], "text": {}, "tools": [], "include": [], "truncation": "disabled"},
        {"model": "gpt-5", "input": [hello], "tool_choice": "auto", "parallel_tool_calls": True},
        {"input": [hello], "background": False, "top_logprobs": 0, "truncation": "auto"},
        {
            **{"input": "Hi", "reasoning": {"summary": "auto"}, "store": False},
            **{"text": {"verbosity": "low", "format": {"type": "text"}}, "user": "me"},
            **{"include": ["reasoning.encrypted_content"], "service_tier": "auto"},
        },
        # Home Assistant, after a call of a tool
        {
            **{"model": "gpt-4o-mini", "max_output_tokens": 3000, "temperature": 1.0, "top_p": 1.0},
            **{"user": "01J", "store": False, "tools": [TOOL], "text": {"verbosity": "low"}},
            "input": [
                {"type": "message", "role": "developer", "content": "You are a voice assistant."},
                hello,
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": '{"done": true}'},
            ],
        },
        # instructor's RESPONSES_TOOLS
        {
            **{"input": [hello], "tools": [TOOL]},
            "text": {
                "format": {"type": "json_schema", "name": "add", "schema": {}, "strict": True}
            },
            "tool_choice": {"type": "function", "name": "add"},
        },
        # guidellm, and vllm bench's openai-responses
        {"input": [hello], "max_output_tokens": 16, "stop": None, "ignore_eos": True},
        {"input": "Hi", "max_output_tokens": 16, "repetition_penalty": 1.0, "top_k": -1},
    ]
    with scripted() as (model, client, server):
        for body in bodies:
            answer = ask(f"{url_of(server)}/v1/responses", body)
            assert answer.status == 200, answer.body
            Response.model_validate(answer.json())
        assert len(model.asked) == len(bodies)
        reasoning: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": ""}
        client.responses.create(model=MODEL, input=[hello, reasoning, hello])  # type: ignore[list-item]
        assert [message["role"] for message in model.asked[-1][0]] == ["user", "user"]


def message(part: Any, role: str = "user") -> dict[str, Any]:
    return {"input": [{"role": role, "content": [part]}]}


def result(part: Any) -> dict[str, Any]:
    return {"input": [{"type": "function_call_output", "call_id": "1", "output": [part]}]}


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"top_logprobs": 3}, r"top_logprobs needs include: \[message.output_text.logprobs\]"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, r"^tools\[0\].name: Field required"),
        ({"tool_choice": {"type": "file_search"}}, "no built-in tools"),
        ({"tool_choice": {"type": "function"}}, "^tool_choice.name: Field required"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "^tool_choice.tools: "),
        ({"input": []}, "no message"),
        ({"input": [{"type": "reasoning", "id": "rs_1"}]}, "no message"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, r"input\[0\].type.*message,"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, r"input\[0\].role"),
        (message({"type": "input_text", "text": "", "x": 1}), r"input\[0\].content\[0\].x"),
        ({"input": 5}, "a string or a list of items"),
        (message({"type": "input_image", "file_id": "f"}), r"content\[0\].image_url: no files"),
        (
            message({"type": "input_file", "file_id": "f"}),
            r"^input\[0\].content\[0\].type: documents are not",
        ),
        (result({"type": "x"}), "output"),
        (result(IMAGE), r"^input\[0\].output\[0\].type: .* a function's result must be text"),
        (message(IMAGE, "assistant"), r"^input\[0\].content\[0\] is image, which only user m"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "is not stored"),
        ({"previous_response_id": "resp_0"}, "is not stored"),
        ({"previous_response_id": ""}, "is not stored"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"modalities": ["text", "audio"]}, "chat/completions, which speaks"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(unasked, change, said) -> None:
    model, server = unasked
    answer = ask(f"{url_of(server)}/v1/responses", {"input": "Hi", **change})
    assert answer.status == 400, answer.body
    assert re.search(said, answer.json()["error"]["message"]), answer.body
    assert not model.asked
    wait_until(lambda: server.service.held.taken == 0)


def test_what_a_conversation_names_is_bounded_like_a_body() -> None:
    """A small body may name much."""
    limits: Any = {"max_body_bytes": 1 << 16, "max_kept_response_bytes": 1 << 20}
    with scripted(["word " * 6000], **limits) as (_, client, server):
        previous, refused = None, None
        for _ in range(4):
            try:
                made = client.responses.create(
                    model=MODEL, input="Hi", previous_response_id=previous
                )
            except openai.APIStatusError as error:
                refused = error
                break
            previous = made.id
        assert refused is not None and refused.status_code == 413
        assert "Begin another conversation" in refused.message
        reference: Any = {"type": "item_reference", "id": made.output[0].id}
        with pytest.raises(openai.APIStatusError, match="Begin another"):
            client.responses.create(model=MODEL, input=[reference] * 100)
        assert server.service.held.taken == server.service.responses.bytes_held
