"""Every field that a client knows is honoured, without effect and listed, or refused by name."""

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_origin

import numpy as np
import pytest
from openai.types.audio import speech_create_params, transcription_create_params
from openai.types.chat import completion_create_params
from openai.types.realtime import conversation_item_param
from openai.types.realtime import realtime_response_create_params_param as realtime_response
from openai.types.realtime import realtime_session_create_request_param as realtime_session
from openai.types.realtime import (
    realtime_transcription_session_create_request_param as realtime_transcription,
)
from openai.types.responses import (
    function_tool_param,
    input_item_list_params,
    response_create_params,
    response_input_item_param,
)
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import get_type_hints, is_typeddict

from qwen3_omni_neuron.errors import REMOVED_FIELDS, InputError, MessageError
from qwen3_omni_neuron.prompt.media.fields import ITEM_FIELDS, fields_of
from qwen3_omni_neuron.prompt.messages import MEDIA_KINDS, MessageReader
from qwen3_omni_neuron.serving.endpoints import speech, transcriptions
from qwen3_omni_neuron.serving.endpoints.client_secrets import ClientSecretRequest
from qwen3_omni_neuron.serving.endpoints.completions import CompletionRequest
from qwen3_omni_neuron.serving.endpoints.media import MediaReader
from qwen3_omni_neuron.serving.openai.bodies import ClientObject, parse_json, refused_field
from qwen3_omni_neuron.serving.openai.chat_request import (
    CalledFunction,
    ChatRequest,
    EarlierAudio,
    MediaObject,
    ToolCall,
    check_request,
    conversation,
    item_fields,
    request_options,
)
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.fields import (
    CHAT,
    HONOURED_AS,
    INPUT_ITEMS,
    ITEM,
    LOGPROBS,
    NO_EFFECT,
    REALTIME,
    REFUSED,
    REFUSED_IN_RESPONSES,
    RESPONSES,
    SPEECH,
    TRANSCRIPTIONS,
    Voices,
    sent_without_effect,
)
from qwen3_omni_neuron.serving.openai.openapi import advice_for
from qwen3_omni_neuron.serving.openai.responses import (
    EarlierReasoning,
    InputCall,
    ItemsQuery,
    ResponseRequest,
    chat_request_of,
    check_response_request,
    fields_of_query,
)
from qwen3_omni_neuron.serving.realtime.audio_codecs import codec_of
from qwen3_omni_neuron.serving.realtime.events import (
    ItemCreate,
    ResponseCreate,
    SessionUpdate,
    read_event,
    read_items,
)
from qwen3_omni_neuron.serving.realtime.items import read_item as read_draft
from qwen3_omni_neuron.serving.realtime.session_config import (
    ResponseConfig,
    SessionConfig,
    SoundFormat,
    first_config,
    response_config,
    updated,
    without_mcp,
)
from qwen3_omni_neuron.serving.realtime.session_config import options_of as options_of_session
from qwen3_omni_neuron.serving.settings import ServerSettings

Json = dict[str, Any]
URL = "data:;base64,AAAA"
TEXT: Json = {"type": "text", "text": "a"}
TOOL: Json = {"type": "function", "function": {"name": "f"}}
CALL: Json = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "a"}}
ALLOWED: Json = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}


FIELDS = {
    path: [f"{at}.{name}".lstrip(".") for at, names in places.items() for name in names.split()]
    for path, places in NO_EFFECT.items()
}


def sent(path: str, given: Any, model: str) -> list[str]:
    return list(sent_without_effect(path, given, model))


def said(audio_id: str) -> str:
    return f"said {audio_id}"


class Service:
    """Part of the server that a MediaReader uses before anything is decoded."""

    settings = ServerSettings()


def user(*parts: Any, **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": list(parts) or "Hi", **fields}]}


def assistant(**fields: Any) -> Json:
    reply = {"role": "assistant", "content": "Hello.", **fields}
    return {"messages": [{"role": "user", "content": "Hi"}, reply]}


def after(message: Json) -> Json:
    return {"messages": [{"role": "user", "content": "Hi"}, message]}


def part(kind: str, inner: Json | None = None, **fields: Any) -> Json:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": URL, **(inner or {})}, **fields}


def sound(inner: Json | None = None, **fields: Any) -> Json:
    held = {"data": "AAAA", "format": "wav", **(inner or {})}
    return {"type": "input_audio", "input_audio": held, **fields}


def read(body: Json) -> tuple[Any, list[str]]:
    """Return what a request asks the model for, and its fields without effect.

    Raises ApiError for a field that is refused.
    """
    full = {"model": "own", **user(), **body}
    wanted = parse_json(ChatRequest, json.dumps(full).encode())
    check_request(wanted)
    media: Any = MediaReader(Service(), None, "me", fields=item_fields(wanted))  # type: ignore[arg-type]
    voices = Voices(("Ethan", "Chelsie"))
    options = request_options(wanted, ServerSettings(), "me", voices, False)
    messages = conversation(wanted, media.read, said)
    items = [(found.kind, found.content, found.options) for found in media._items]
    shape = (wanted.speaks, wanted.sound_format, wanted.stream, wanted.stream_options)
    shape += (wanted.model,)
    return (options, messages, items, shape), sent(CHAT, wanted, "own")


# By path: a body with the field, and one that differs in nothing else. What the second lacks has an
# effect, which is seen in what the model is asked for.
SPOKEN: Json = {"modalities": ["text", "audio"]}
IN_JSON: Json = {"response_format": SCHEMA}
HONOURED: Mapping[str, tuple[Json, Json]] = {
    "messages": (user(), user(TEXT)),
    "model": ({"model": "own"}, {"model": "gpt-4o"}),
    "audio.voice": ({**SPOKEN, "audio": {"voice": "Chelsie"}}, {**SPOKEN, "audio": {}}),
    "audio.voice.id": ({**SPOKEN, "audio": {"voice": {"id": "Chelsie"}}}, {**SPOKEN, "audio": {}}),
    "audio.format": ({**SPOKEN, "audio": {"format": "mp3"}}, {**SPOKEN, "audio": {}}),
    "frequency_penalty": ({"frequency_penalty": 1}, {}),
    "presence_penalty": ({"presence_penalty": 1}, {}),
    "logprobs": ({"logprobs": True}, {}),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True}),
    "max_completion_tokens": ({"max_completion_tokens": 5}, {}),
    "max_tokens": ({"max_tokens": 5}, {}),
    "modalities": (SPOKEN, {}),
    "parallel_tool_calls": ({"parallel_tool_calls": False}, {}),
    "response_format": (IN_JSON, {}),
    "response_format.type": ({"response_format": {"type": "json_object"}}, {}),
    "response_format.json_schema.schema": (
        {"response_format": {**SCHEMA, "json_schema": {"name": "a", "schema": {"type": "string"}}}},
        IN_JSON,
    ),
    "response_format.json_schema.strict": (
        {"response_format": {**SCHEMA, "json_schema": {"name": "a", "strict": True}}},
        IN_JSON,
    ),
    "seed": ({"seed": 5}, {}),
    "stop": ({"stop": "x"}, {}),
    "stream": ({"stream": True}, {}),
    "stream_options.continuous_usage_stats": (
        {"stream_options": {"continuous_usage_stats": True}},
        {},
    ),
    "stream_options.include_usage": ({"stream_options": {"include_usage": True}}, {}),
    "temperature": ({"temperature": 0.5}, {}),
    "top_p": ({"top_p": 0.5}, {}),
    "tools": ({"tools": [TOOL]}, {}),
    **{
        f"tools[].function.{name}": (
            {"tools": [{**TOOL, "function": {"name": "f", name: value}}]},
            {"tools": [{**TOOL, "function": {"name": "g" if name == "name" else "f"}}]},
        )
        for name, value in {
            **{"name": "f", "description": "d", "parameters": {"type": "object"}},
            "strict": True,
        }.items()
    },
    "tool_choice": ({"tool_choice": "required"}, {}),
    "tool_choice.function.name": ({"tool_choice": TOOL}, {}),
    "tool_choice.allowed_tools.mode": ({"tool_choice": ALLOWED}, {}),
    "tool_choice.allowed_tools.tools": ({"tool_choice": ALLOWED}, {}),
    "messages[].role": (after({"role": "system", "content": "a"}), assistant(content="a")),
    "messages[].content": (user(), {"messages": [{"role": "user", "content": "Ho"}]}),
    "messages[].refusal": (assistant(content=None, refusal="No."), assistant()),
    "messages[].audio.id": (assistant(content=None, audio={"id": "a"}), assistant()),
    "messages[].tool_call_id": (
        after({"role": "tool", "tool_call_id": "c", "content": "5"}),
        after({"role": "tool", "tool_call_id": "d", "content": "5"}),
    ),
    "messages[].tool_calls[].id": (
        assistant(tool_calls=[CALL]),
        assistant(tool_calls=[{**CALL, "id": "other"}]),
    ),
    "messages[].tool_calls[].function.name": (assistant(tool_calls=[CALL]), assistant()),
    "messages[].tool_calls[].function.arguments": (assistant(tool_calls=[CALL]), assistant()),
    "messages[].content[].type": (user(TEXT), user()),
    "messages[].content[].text": (user(TEXT), user()),
    "messages[].content[].refusal": (
        assistant(content=[{"type": "refusal", "refusal": "No."}]),
        assistant(),
    ),
    "messages[].content[].image_url.url": (user(part("image")), user()),
    "messages[].content[].image_url.detail": (
        user(part("image", {"detail": "low"})),
        user(part("image")),
    ),
    "messages[].content[].input_audio.data": (user(sound()), user()),
}
CUSTOM: Json = {"type": "custom", "custom": {"name": "f"}}
# By path: a body that is refused by its type, and the end of the error's param.
OF_OTHER_TYPES: Mapping[str, tuple[Json, str]] = {
    "tool_choice.custom": ({"tool_choice": CUSTOM}, "tool_choice.type"),
    "messages[].function_call": (assistant(function_call={"name": "f"}), "[1].function_call"),
    "messages[].tool_calls[].custom": (assistant(tool_calls=[{**CUSTOM, "id": "c"}]), "[0].type"),
    "messages[].content[].file": (user({"type": "file", "file": {}}), "content[0].type"),
}
# Objects that are refused as a whole, and those whose content no one reads.
CLOSED = (
    *("functions", "function_call", "moderation", "web_search_options", "prediction"),
    *("prompt_cache_options", "metadata", "logit_bias", "tools[].function.parameters"),
    *("tools[].custom", "tool_choice.custom", "messages[].tool_calls[].custom"),
    *("messages[].function_call", "messages[].content[].file"),
    *("messages[].content[].prompt_cache_breakpoint", "response_format.json_schema.schema"),
    "tool_choice.allowed_tools.tools",
)


def published(kind: Any, path: str = "", closed: Sequence[str] = CLOSED) -> Iterator[str]:
    """Yield the paths of all fields of a TypedDict of openai-python, and of those inside."""
    if get_origin(kind) is not None:
        listed = getattr(get_origin(kind), "__name__", "") in ("Iterable", "list", "List")
        for inner in get_args(kind):
            yield from published(inner, f"{path}[]" if listed and path else path, closed)
    elif is_typeddict(kind):
        for name, inner in get_type_hints(kind).items():
            place = f"{path}.{name}" if path else name
            yield place
            if place not in closed:
                yield from published(inner, place, closed)


def with_parents(paths: Iterable[str]) -> set[str]:
    """Return paths, those of the objects that they are in, and of the types of these."""
    parents = {path[:end] for path in paths for end, sign in enumerate(path) if sign == "."}
    return {
        *paths,
        *parents,
        *(p.removesuffix("[]") for p in parents),
        *(f"{p}.type" for p in parents),
    }


def test_tools_of_other_types_are_skipped_and_those_in_namespaces_are_functions() -> None:
    space = {"type": "namespace", "name": "mcp__a__", "description": "d"}
    others = [CUSTOM, {"type": "web_search"}, {"type": "web_search", "filters": {"a": [1]}}]
    for reads, function, kind in (
        (read, TOOL, ChatRequest),
        (read_response, FLAT, ResponseRequest),
    ):
        inside = {**space, "tools": [function, {"type": "custom", "name": "x"}]}
        options = reads({"tools": [*others, inside, function]})[0][0]
        assert [tool["function"]["name"] for tool in options["tools"]] == ["mcp__a__f", "f"]
        assert reads({"tools": others})[0] == reads({})[0]
        given = {"messages": user()["messages"], "input": "Hi", "tools": [*others, inside]}
        given.pop("messages" if reads is read_response else "input")
        wanted: Any = kind.model_validate(given)
        assert wanted.skipped == ["custom", "web_search", "web_search"]
        assert wanted.in_spaces == {"mcp__a__f": ("mcp__a__", "f")}
    call = {**FLAT_CALL, "namespace": "mcp__a__"}
    (_, (_, said, *_), *_), _ = read_response({**MESSAGE, "input": [*MESSAGE["input"], call]})
    assert said["tool_calls"][0]["function"]["name"] == "mcp__a__f"


OF_SCHEMA: Json = {"type": "object", "properties": {}}
# Fields of vLLM and SGLang, and the grammar that they ask for.
GRAMMARS: Sequence[tuple[Json, Json]] = (
    ({"guided_json": OF_SCHEMA}, {"json": OF_SCHEMA}),
    ({"guided_json": json.dumps(OF_SCHEMA)}, {"json": OF_SCHEMA}),
    ({"json_schema": json.dumps(OF_SCHEMA)}, {"json": OF_SCHEMA}),
    ({"guided_regex": "[a-z]"}, {"regex": "[a-z]"}),
    ({"regex": "[a-z]"}, {"regex": "[a-z]"}),
    ({"guided_choice": ["a b", 'c"']}, {"lark": 'start: "a b" | "c\\""'}),
    ({"guided_grammar": "start: A"}, {"lark": "start: A"}),
    ({"ebnf": 'root ::= "a"'}, {"lark": 'root ::= "a"'}),
    (
        {"structured_outputs": {"json": OF_SCHEMA, "disable_any_whitespace": False}},
        {"json": OF_SCHEMA},
    ),
    ({"structured_outputs": {"choice": ["a"]}}, {"lark": 'start: "a"'}),
    ({"structured_outputs": {"json_object": True}}, {"json": {"type": "object"}}),
    ({"structured_outputs": {}}, {}),
)


def test_grammar_fields_of_engines_are_the_grammar_that_exists() -> None:
    for reads in (read, read_response):
        for given, grammar in GRAMMARS:
            assert reads(given)[0][0].get("grammar", {}) == grammar
        for given, path in (
            ({"guided_json": 5}, "guided_json"),
            ({"guided_json": "{"}, None),
            ({"guided_choice": []}, "guided_choice"),
            ({"regex": 5}, "regex"),
            ({"structured_outputs": 5}, "structured_outputs"),
            ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
            ({"structured_outputs": {"regex": "a"}, "ebnf": "b"}, "structured_outputs.regex"),
            ({"regex": "a", "grammar": {"regex": "b"}}, "regex"),
        ):
            with pytest.raises(ApiError) as refused:
                reads(given)
            assert refused.value.param == path
    schema = {"response_format": {"type": "json_object", "schema": OF_SCHEMA}}
    assert read(schema)[0][0]["grammar"] == {"json": OF_SCHEMA}
    flat = {"text": {"format": schema["response_format"]}}
    assert read_response(flat)[0][0]["grammar"] == {"json": OF_SCHEMA}
    with pytest.raises(ApiError, match="give response_format or regex, not both"):
        read({**schema, "regex": "a"})


def test_what_is_of_another_type_is_refused_by_its_place() -> None:
    for body, end in OF_OTHER_TYPES.values():
        with pytest.raises(ApiError) as refused:
            read(body)
        assert refused.value.status == 400
        assert str(refused.value.param).endswith(end)


def test_every_row_of_the_table_is_honoured_or_refused_but_for_its_one_value() -> None:
    def options(asked: Json, reads: Callable[[Json], Any] = read) -> Json:
        return dict(reads(asked)[0][0])

    for name, option in HONOURED_AS.items():
        value = name == "ignore_eos" or (0.5 if name == "min_p" else 2)
        for reads in (read, read_response):
            assert options({name: value}, reads)[option] == value
            assert option not in options({name: None}, reads)
        if name != option:
            with pytest.raises(ApiError, match=f"{option} is 1, but another field"):
                read({name: value, option: 1})
    for reads, table in ((read, REFUSED), (read_response, REFUSED | REFUSED_IN_RESPONSES)):
        for name, (only, instead) in table.items():
            assert (
                options({name: only}, reads) == options({name: None}, reads) == options({}, reads)
            )
            for wrong in ("x", 5, [5], {"a": 5}, *(() if isinstance(only, bool) else (True,))):
                with pytest.raises(ApiError, match=rf"^{name} can only be ") as refused:
                    reads({name: wrong})
                assert (refused.value.code, refused.value.param) == ("invalid_value", name)
                assert instead in refused.value.message
    assert options({"top_k": -1})["thinker_top_k"] == 0
    assert options({"length_penalty": 1.0}) == options({})


def test_a_removed_name_is_refused_with_what_to_use_instead(monkeypatch) -> None:
    monkeypatch.setitem(REMOVED_FIELDS, "colour", "take `tint`.")
    part = {**TEXT, "colour": "red"}
    for body in ({"colour": "red"}, user(part), {"audio": {"colour": "red"}}):
        with pytest.raises(ApiError, match="colour was removed: take `tint`"):
            read(body)
    said = advice_for("/v1/audio/translations")
    assert said.startswith("/v1/audio/translations was removed: ask for a translation")


# What is wrong with a body, and the code of its error.
CODES: Sequence[tuple[Json, str]] = (
    ({"messages": None}, "invalid_type"),
    ({"messages": [{"content": "a"}]}, "missing_required_parameter"),
    ({"colour": "red"}, "unknown_parameter"),
    ({"mm_processor_kwargs": {"colour": "red"}}, "unknown_parameter"),
    ({"sampling_params_list": [{"colour": "red"}]}, "unknown_parameter"),
    ({"structured_outputs": {"colour": "red"}}, "unknown_parameter"),
    ({"temperature": "a"}, "invalid_type"),
    ({"temperature": 3}, "invalid_value"),
    ({"functions": [{"name": "f"}]}, "invalid_value"),
)


def test_the_code_of_an_error_names_its_kind() -> None:
    for body, code in CODES:
        with pytest.raises(ApiError) as refused:
            read(body)
        assert refused.value.code == code
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        with pytest.raises(ApiError, match=f"^{name} can only be .* Use {instead}"):
            read({name: [{"name": "f"}]})


def test_a_checkpoint_thinks_as_it_does() -> None:
    for given in (
        *({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        *({"thinking": {"type": "disabled"}}, {"thinking": {"type": "auto"}}, {"thinking": {}}),
    ):
        assert read(given)[0] == read({})[0]
    for given, said in (
        ({"thinking": {"type": "enabled"}}, "^thinking.type: this checkpoint never thinks"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "can only have the type"),
        ({"thinking": 5}, "can only have the type"),
        ({"enable_thinking": True}, "^enable_thinking: this checkpoint never thinks"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "never thinks"),
        ({"chat_template_kwargs": {"colour": 1}}, "can only have enable_thinking"),
    ):
        with pytest.raises(ApiError, match=said):
            read(given)


def test_fields_of_all_media_are_those_of_each_item_that_has_no_others() -> None:
    given = {name: RIGHT[name] for name in fields_of("video", over_http=True) if name != "nframes"}

    def options(*parts: Json, **fields: Any) -> list[Json]:
        return [one[2] for one in read({**user(*parts), "mm_processor_kwargs": fields})[0][2]]

    seen = {name: value for name, value in given.items() if name in fields_of("image")}
    parts = part("video"), part("image", max_pixels=9000), sound()
    assert options(*parts, **given) == [given, {**seen, "max_pixels": 9000}, {}]
    frames = {"type": "video", "video": [URL]}
    assert options(frames, **given) == [{**seen, "total_pixels": 1000000, "fps": 2.0}]
    assert options(frames, use_audio_in_video=True) == [{"fps": 2.0}]
    for wrong in [*({n: v} for n, vs in WRONG.items() for v in vs), {"use_audio_in_video": 1}]:
        (name,) = wrong
        with pytest.raises(ApiError, match=name) as refused:
            options(**wrong)
        assert refused.value.param == f"mm_processor_kwargs.{name}"


STAGES = ("thinker", "talker", None)


def test_each_stages_sampling_is_honoured_without_effect_or_refused() -> None:
    names = {**dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 0.5), "top_k": 2}
    names |= {"max_tokens": 7, "seed": 3, "detokenize": True, "stop_token_ids": [2150]}
    for number, stage in enumerate(STAGES):
        for name, value in names.items():
            stages = [{}] * number + [{name: value}]
            (options, *_), counted = read({"sampling_params_list": stages})
            option = "seed" if name == "seed" else f"{stage}_{name}"
            option = option.replace("max_tokens", "max_new_tokens")
            honoured = options.get(option) == value
            assert honoured or counted == [f"sampling_params_list[{number}].{name}"]
            assert honoured == (stage is not None and name in list(names)[: 6 - number])
    for number, name in ((0, "nonsense"), (1, "min_p"), (2, "best_of")):
        with pytest.raises(ApiError, match=rf"\[{number}\]\.{name}: this field is unknown"):
            read({"sampling_params_list": [{}] * number + [{name: 1}]})


def models_in(kind: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a body's model and those in it, and its open objects, each by a path to it."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield path, kind
        for name, one in kind.model_fields.items():
            yield from models_in(one.annotation, f"{path}.{one.alias or name}")
    elif get_origin(kind) is dict or kind is dict:
        yield path, dict
    for inner in get_args(kind):
        yield from models_in(inner, path)


# Objects that are schemas, notes that come back, without effect as a whole, or checked elsewhere.
FREE = {"parameters", "schema", "metadata", "prompt.variables"}
READ = {"sampling_params_list", "session", "truncation", "response"}
READ_BACK = (EarlierAudio, ToolCall, CalledFunction, InputCall, EarlierReasoning)
BODIES: Sequence[type[BaseModel]] = (
    *(ChatRequest, CompletionRequest, ResponseRequest, speech.SpeechRequest),
    *(transcriptions.TranscriptionRequest, ClientSecretRequest, SessionConfig, ResponseConfig),
    *(SessionUpdate, ItemCreate, ResponseCreate),
)


def test_no_object_at_any_depth_takes_a_field_that_nobody_knows() -> None:
    """MediaReader checks the fields of parts with media; replies are sent back as they came."""
    found = [one for body in BODIES for one in models_in(body, body.__name__)]
    for path, kind in found:
        if kind is dict:
            assert path.endswith(tuple(FREE | READ))
        elif issubclass(kind, ClientObject) and not issubclass(kind, (MediaObject, *READ_BACK)):
            made = kind.model_construct(role="user", type="input_text")
            made.__pydantic_extra__ = {"colour": "red"}
            with pytest.raises(PydanticCustomError, match="unknown here"):
                made._check_further()
    assert len(found) > 100


# Fields of parts. What qwen-omni-utils 0.0.9 reads of an element, by its kind.
QWENS = {
    "audio": "audio_start audio_end",
    "image": "min_pixels max_pixels resized_height resized_width",
    "video": "min_pixels max_pixels total_pixels resized_height resized_width fps nframes "
    "min_frames max_frames video_start video_end",
}
# A right value by a field's name, wrong ones, and what goes with it.
RIGHT: Mapping[str, Any] = {
    **{"detail": "low", "fps": 0.5, "nframes": 6, "min_frames": 3, "max_frames": 8},
    **{"min_pixels": 4096, "max_pixels": 8192, "total_pixels": 1e6, "resized_height": 280},
    **{"resized_width": 420, "video_start": 1, "video_end": 2.5, "audio_start": 0, "audio_end": 1},
}
WRONG: Mapping[str, tuple[Any, ...]] = {
    "detail": ("LOW", 1, ["low"]),
    "fps": (0, -1, "2", True, 1e9),
    "nframes": (1, 2.5, "6", True),
    "min_frames": (0, 2.5, True),
    "max_frames": (1, "8"),
    "min_pixels": (0, 1.5, "a", True, [1]),
    "max_pixels": (0, -5, 1.5, True, "9"),
    "total_pixels": (0, "a", True),
    "resized_height": (0, -1, 1.5, True, "64", 2**21, 10**400),
    "resized_width": (0, "a"),
    **dict.fromkeys(("video_start", "audio_start"), (-1, "a", True, 1e12)),
    **dict.fromkeys(("video_end", "audio_end"), (-1, 0, "a", {})),
}
WITH: Mapping[str, Json] = {
    "resized_height": {"resized_width": 420},
    "resized_width": {"resized_height": 280},
}
OF_KINDS = [(kind, name) for kind in MEDIA_KINDS for name in fields_of(kind, over_http=True)]
MEDIA: Mapping[str, Any] = {"audio": b"a", "image": b"a", "video": b"a"}


def read_item(item: Json) -> Json:
    """Return what the reader of an item's medium gets in Python. Raises InputError."""
    reader = MessageReader([], lambda kind, item, where: dict(item))
    reader.message({"role": "user", "content": [item]}, "messages[0]")
    (got,) = reader.media
    return got


def options_of(*parts: Json) -> Json:
    """Return the options of the first part's job over HTTP. Raises ApiError."""
    options: Json = read(user(*parts))[0][2][0][2]
    return options


def test_every_field_of_qwens_and_openais_parts_is_in_the_table() -> None:
    for kind, names in QWENS.items():
        detail = [] if kind == "audio" else ["detail"]
        assert set(fields_of(kind, over_http=True)) == {*names.split(), *detail}
    assert set(RIGHT) == set(WRONG) == {f.name for f in ITEM_FIELDS if f.over_http}


def test_a_field_of_a_part_reaches_the_reader_of_its_medium() -> None:
    for kind, name in OF_KINDS:
        given = {name: RIGHT[name], **WITH.get(name, {})}
        assert options_of(part(kind, None, **given)) == given
        assert options_of(part(kind, given)) == given
        assert options_of(part(kind, given, **given)) == given
        if kind == "audio":
            assert options_of(sound(given)) == options_of(sound(None, **given)) == given
        plain, none = {"type": kind, kind: MEDIA[kind]}, dict.fromkeys(given)
        assert read_item({**plain, **given}) == {**plain, **given}
        assert options_of(part(kind, none, **none)) == {}
        assert read_item({**plain, **none}) == plain


def test_a_wrong_value_is_refused_with_its_field() -> None:
    for kind, name in OF_KINDS:
        for value in WRONG[name]:
            given = {**WITH.get(name, {}), name: value}
            for inner, beside, at in ((given, {}, f".{kind}_url"), ({}, given, "")):
                with pytest.raises(ApiError, match=name) as refused:
                    options_of(part(kind, inner, **beside))
                assert refused.value.param == f"messages[0].content[0]{at}.{name}"
            with pytest.raises(
                InputError, match=rf"^messages\[0\]\.content\[0\] has {name} "
            ) as wrong:
                read_item({"type": kind, kind: MEDIA[kind], **given})
            assert str(wrong.value) == refused.value.message


def test_fields_that_do_not_fit_are_refused_alike_over_http_and_in_python() -> None:
    for kind, given, words in (
        ("video", {"fps": 1, "nframes": 4}, "fps and nframes. Give one"),
        ("video", {"min_frames": 9, "max_frames": 8}, "min_frames 9, above its max_frames 8"),
        ("image", {"min_pixels": 9, "max_pixels": 8}, "min_pixels 9, above its max_pixels 8"),
        ("video", {"video_start": 2, "video_end": 2}, "video_end 2, which is not after"),
        ("audio", {"audio_start": 2, "audio_end": 1.5}, "audio_end 1.5, which is not after"),
        ("image", {"resized_height": 28}, "resized_height without resized_width"),
        ("video", {"resized_width": 28}, "resized_width without resized_height"),
        ("image", {"fps": 1}, "unknown field 'fps'. It is a field of video items"),
        ("audio", {"detail": "low"}, "It is a field of image and video items"),
        ("video", {"nframe": 4}, r"Did you mean nframes\?"),
        ("video", {"use_audio_in_video": True}, "an option of the request"),
        ("video", {"raw_fps": 2.0}, "The rate of frames is fps"),
    ):
        with pytest.raises(ApiError, match=words) as refused:
            options_of(part(kind, None, **given))
        assert str(refused.value.param).startswith("messages[0].content[0].")
        with pytest.raises(InputError, match=words):
            read_item({"type": kind, kind: MEDIA[kind], **given})


OF_FILES = ["nframes", "min_frames", "max_frames", "video_start", "video_end"]
FRAMES: Mapping[str, Any] = {
    "an array": np.zeros((4, 28, 28, 3), np.uint8),
    "pictures": [np.zeros((28, 28, 3), np.uint8)] * 4,
    "paths": ["a.png", "b.png"],
}


@pytest.mark.parametrize("name", fields_of("video"))
@pytest.mark.parametrize("form", FRAMES)
def test_a_field_that_is_for_a_file_is_refused_beside_frames(form, name) -> None:
    right = {**RIGHT, "sample_fps": 2.0, "sampling_rate": 16000, "audio": np.zeros(16000)}
    item = {"type": "video", "video": FRAMES[form], "fps": 2.0, name: right[name]}
    item.update(WITH.get(name, {}))
    if name in OF_FILES:
        words = rf"^messages\[0\]\.content\[0\] has {name}, which is for files, but the video is "
        with pytest.raises(InputError, match=words + "frames. Leave it out"):
            read_item(item)
        with pytest.raises(ApiError, match=words) as refused:
            options_of({"type": "video", "video": [URL], name: right[name]})
        assert refused.value.param == f"messages[0].content[0].{name}"
    else:
        assert read_item(item).keys() == item.keys()


# The other endpoints and the socket. Each reader returns what is asked of the server, and the
# names of the fields without effect; it raises ApiError for a field that is refused.

VOICES = Voices(("Ethan", "Chelsie"))
Found = tuple[Any, list[str]]
PCM = base64.b64encode(bytes(3200)).decode()
FLAT: Json = {"type": "function", "name": "f"}
FLAT_CALL: Json = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
FLAT_RESULT: Json = {"type": "function_call_output", "call_id": "c", "output": "5"}


def read_speech(body: Json) -> Found:
    full = {"input": "Hi.", "model": "own", **body}
    wanted = parse_json(speech.SpeechRequest, json.dumps(full).encode())
    asked = wanted.model_dump(exclude={"voice", *FIELDS[SPEECH]})
    return (asked, VOICES.speaker(wanted.voice or "Ethan", "voice")), sent(SPEECH, wanted, "own")


def read_transcription(body: Json) -> Found:
    try:
        wanted = transcriptions.TranscriptionRequest.model_validate({"model": "own", **body})
    except ValidationError as error:
        raise refused_field(error) from error
    wanted.check()
    asked = wanted.model_dump(exclude={*FIELDS[TRANSCRIPTIONS]})
    return asked, sent(TRANSCRIPTIONS, wanted, "own")


def read_session(body: Json) -> Found:
    left, wrong = without_mcp(body)
    if wrong is not None:
        raise wrong
    config = updated(first_config("own", VOICES), left, VOICES, by_meaning=True)
    heard, said = config.audio.input, config.audio.output
    detection = heard.turn_detection
    asked = (
        *(options_of_session(config), config.instructions, config.output_modalities),
        *(config.answers, bool(config.include), heard.format, said.format, said.speed),
        *(heard.transcription is not None, detection and detection.turns),
        detection and (detection.create_response, detection.interrupt_response),
    )
    return asked, sent(REALTIME, body, "own")


def read_response_create(body: Json) -> Found:
    config = response_config(body, VOICES, SoundFormat())
    asked = (
        *(options_of_session(config), config.instructions, config.output_modalities),
        *(config.conversation, config.metadata, read_items(config.input or [])),
    )
    return asked, sent(REALTIME, body, "own")


class HeldBytes:
    """Account of a session that may hold anything."""

    def hold(self, size: int) -> None:
        """Hold memory."""

    def release(self, size: int) -> None:
        """Release memory."""


def read_socket_item(body: Json) -> Found:
    full = {"type": "conversation.item.create", "item": {"role": "user", "content": [], **body}}
    if body.get("type", "message") != "message":
        full["item"] = body
    full["item"].setdefault("type", "message")
    event = read_event(full)
    assert isinstance(event, ItemCreate)
    media: Any = MediaReader(Service(), None, "me")  # type: ignore[arg-type]
    draft = read_draft(event.item, HeldBytes(), media, codec_of("audio/pcm", None))  # type: ignore[arg-type]
    shown = {n: v for n, v in draft.shown.items() if n != "id" or "id" in body}
    items = [(found.content, found.options) for found in media._items]
    asked = repr((draft.role, draft.given, draft.calls, shown, items))
    return asked, sent(ITEM, event.item, "own")


def read_response(body: Json) -> Found:
    full = {"model": "own", "input": "Hi", **body}
    asked = parse_json(ResponseRequest, json.dumps(full).encode())
    check_response_request(asked)
    items = [i for i in asked.items if i.type != "item_reference"]
    items = items if len(items) > 0 else [*ResponseRequest(input="Hi").items]
    named = [(f"input[{number}]", item) for number, item in enumerate(items)]
    counted = sent(RESPONSES, asked, "own")
    wanted, names = chat_request_of(asked, named, 1000)
    check_request(wanted)
    media: Any = MediaReader(Service(), None, "me")  # type: ignore[arg-type]
    options = request_options(wanted, ServerSettings(), "me", VOICES, False)
    messages = conversation(wanted, media.read, said, names)
    found = [(item.content, item.options) for item in media._items]
    kept = asked.store, asked.names_earlier, asked.metadata, asked.stream
    return (options, messages, found, kept), counted


def read_items_query(body: Json) -> Found:
    pairs = [
        (name, str(value))
        for name, values in body.items()
        for value in (values if isinstance(values, list) else [values])
    ]
    try:
        query = ItemsQuery.model_validate(fields_of_query(pairs))
    except ValidationError as error:
        raise refused_field(error) from error
    return query.model_dump(exclude={"include"}), sent(INPUT_ITEMS, query, "own")


def beside(path: str, value: Any, base: Json) -> Json:
    """Return a body with a value at a path, and what the objects on the way have in `base`."""
    name, _, rest = path.partition(".")
    listed = re.search(r"\[(\d*)\]$", name)
    name = name[: listed.start()] if listed else name
    if not rest:
        return {**base, name: [value] if listed else value}
    inner = base.get(name)
    if listed:
        before = [{}] * int(listed[1] or 0)
        return {**base, name: [*before, beside(rest, value, (inner or [{}])[0])]}
    return {**base, name: beside(rest, value, inner if isinstance(inner, dict) else {})}


@dataclass(frozen=True)
class Endpoint:
    """Fields of one kind of request, as openai-python's types have them.

    kinds: the types, each with the path before it. read: reads a body. honoured: by path, values
    of the field that make a difference to None, or bodies: with the field, and without it.
    unread: bodies with fields without effect, by path. bases: what is beside the others, by the
    beginning of their paths. closed: objects that are refused, or without effect, as a whole.
    """

    kinds: Sequence[tuple[str, Any]]
    read: Callable[[Json], Found]
    table: str
    honoured: Mapping[str, tuple[Json, Json]]
    bases: Mapping[str, Json] = field(default_factory=dict)
    closed: Sequence[str] = ()

    @property
    def paths(self) -> list[str]:
        found = dict.fromkeys(
            p for at, kind in self.kinds for p in published(kind, at, self.closed)
        )
        return [path for path in found if path not in ("file", *OF_OTHER_TYPES)]


def differs(path: str, value: Any, base: Json | None = None) -> tuple[Json, Json]:
    return beside(path, value, base or {}), base or {}


PCM16, PCMU = {"type": "audio/pcm", "rate": 16000}, {"type": "audio/pcmu"}
SERVER_VAD: Json = {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
SEMANTIC: Json = {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}
INPUT_PCM: Json = {"audio": {"input": {"format": {"type": "audio/pcm"}}}}
OUTPUT_PCM: Json = {"audio": {"output": {"format": {"type": "audio/pcm"}}}}
LIMITED: Json = {"truncation": {"type": "retention_ratio", "retention_ratio": 0.5}}
AT, DETECTS = "audio.input", "audio.input.turn_detection"
FUNCTION: Json = {"tools": [FLAT]}
OF_TOOLS = {
    "tools": (FUNCTION, {}),
    "tools[].name": (FUNCTION, {"tools": [{**FLAT, "name": "g"}]}),
    "tools[].description": differs("tools[].description", "d", FUNCTION),
    "tools[].parameters": differs("tools[].parameters", {"type": "object"}, FUNCTION),
    "parallel_tool_calls": differs("parallel_tool_calls", False),
    "tool_choice": differs("tool_choice", "required", FUNCTION),
    "tool_choice.name": differs("tool_choice", FLAT, FUNCTION),
}
OF_REPLIES = {
    **OF_TOOLS,
    "audio.output.voice": differs("audio.output.voice", "Chelsie"),
    "audio.output.voice.id": differs("audio.output.voice", {"id": "Chelsie"}),
    "instructions": differs("instructions", "Be brief."),
    "max_output_tokens": differs("max_output_tokens", 5),
    "output_modalities": differs("output_modalities", ["text"]),
}
SESSION = Endpoint(
    [("", realtime_session.RealtimeSessionCreateRequestParam)],
    read_session,
    REALTIME,
    {
        **OF_REPLIES,
        "type": ({"type": "transcription"}, {}),
        f"{AT}.format.type": differs(f"{AT}.format", PCMU),
        f"{AT}.format.rate": differs(f"{AT}.format.rate", 16000, INPUT_PCM),
        f"{AT}.transcription": differs(f"{AT}.transcription", {}),
        DETECTS: differs(DETECTS, None),
        f"{DETECTS}.type": (SEMANTIC, SERVER_VAD),
        f"{DETECTS}.eagerness": differs(f"{DETECTS}.eagerness", "low", SEMANTIC),
        **{
            f"{DETECTS}.{name}": differs(f"{DETECTS}.{name}", value, SERVER_VAD)
            for name, value in {
                **{"create_response": False, "interrupt_response": False, "threshold": 0.25},
                **{"idle_timeout_ms": 5000, "prefix_padding_ms": 64, "silence_duration_ms": 64},
            }.items()
        },
        "audio.output.format.type": differs("audio.output.format", PCMU),
        "audio.output.format.rate": differs("audio.output.format.rate", 16000, OUTPUT_PCM),
        "audio.output.speed": differs("audio.output.speed", 0.5),
        "include": differs("include", ["item.input_audio_transcription.logprobs"]),
        "truncation.type": (LIMITED, {}),
        "truncation.retention_ratio": (LIMITED, beside("truncation.retention_ratio", 1, LIMITED)),
        "truncation.token_limits.post_instructions": differs(
            "truncation.token_limits.post_instructions", 9, LIMITED
        ),
    },
    {"tools[]": FUNCTION, "tool_choice": {**FUNCTION, "tool_choice": FLAT}},
    (
        "prompt",
        "reasoning",
        "tracing",
        "tools[].parameters",
        "tools[].require_approval",
        "tools[].allowed_tools",
    ),
)
TRANSCRIBING = replace(
    SESSION, kinds=[("", realtime_transcription.RealtimeTranscriptionSessionCreateRequestParam)]
)
RESPONSE_CREATE = Endpoint(
    [("", realtime_response.RealtimeResponseCreateParamsParam)],
    read_response_create,
    REALTIME,
    {
        **OF_REPLIES,
        "conversation": differs("conversation", "none"),
        "metadata": differs("metadata", {"a": "b"}),
        "input": differs("input", [FLAT_RESULT]),
    },
    {"tools[]": FUNCTION, "tool_choice": {**FUNCTION, "tool_choice": FLAT}},
    (
        *(
            "prompt",
            "reasoning",
            "metadata",
            "tools[].parameters",
            "tools[].require_approval",
            "tools[].allowed_tools",
        ),
        *("input[]", "input"),
    ),
)
SAYS: Json = {"content": [{"type": "input_text", "text": "a"}]}
HEARS: Json = {"content": [{"type": "input_audio", "audio": PCM}]}
SEES: Json = {"content": [{"type": "input_image", "image_url": URL}]}
SAID: Json = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
SPOKE: Json = {"role": "assistant", "content": [{"type": "output_audio", "transcript": "a"}]}
SOCKET_ITEM = Endpoint(
    [("", kind) for kind in get_args(conversation_item_param.ConversationItemParam)[:5]],
    read_socket_item,
    ITEM,
    {
        "id": differs("id", "i", SAYS),
        "type": (FLAT_CALL, SAYS),
        "role": (SAID, SAYS),
        "content": (SAYS, HEARS),
        "content[].type": (SAYS, HEARS),
        "content[].text": (SAYS, beside("content[].text", "b", SAYS)),
        "content[].audio": (HEARS, SAYS),
        "content[].transcript": (SPOKE, beside("content[].transcript", "b", SPOKE)),
        "content[].image_url": (SEES, SAYS),
        "content[].detail": differs("content[].detail", "low", SEES),
        "call_id": (FLAT_RESULT, {**FLAT_RESULT, "call_id": "d"}),
        "name": (FLAT_CALL, {**FLAT_CALL, "name": "g"}),
        "arguments": (FLAT_CALL, {**FLAT_CALL, "arguments": '{"a": 1}'}),
        "output": (FLAT_RESULT, {**FLAT_RESULT, "output": "6"}),
    },
    {"": SAYS},
)
MESSAGE: Json = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}
ANSWER: Json = {"type": "message", "role": "assistant"}
ANSWERED: Json = {"input": [{**ANSWER, "content": [{"type": "output_text", "text": "a"}]}]}
LOOKED: Json = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}
CALLED: Json = {"input": [FLAT_CALL, FLAT_RESULT]}
RESULT: Json = {"input": [FLAT_RESULT]}
IN_PARTS: Json = {"input": [{**FLAT_RESULT, "output": [{"type": "input_text", "text": "a"}]}]}
ALLOWED_FLAT: Json = {
    **FUNCTION,
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FLAT]},
}
FLAT_SCHEMA: Json = {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}
CREATE = response_create_params.ResponseCreateParamsNonStreaming
RESPONSE = Endpoint(
    [
        ("", CREATE),
        ("", response_create_params.ResponseCreateParamsStreaming),
        *(("tools[]", kind) for kind in (function_tool_param.FunctionToolParam,)),
        *(
            ("input[]", kind)
            for kind in (
                response_input_item_param.Message,
                response_input_item_param.EasyInputMessageParam,
                response_input_item_param.ResponseOutputMessageParam,
                response_input_item_param.ResponseFunctionToolCallParam,
                response_input_item_param.FunctionCallOutput,
                response_input_item_param.ItemReference,
            )
        ),
    ],
    read_response,
    RESPONSES,
    {
        **OF_TOOLS,
        "parallel_tool_calls": differs("parallel_tool_calls", False, FUNCTION),
        "input": (MESSAGE, {}),
        "instructions": differs("instructions", "Be brief."),
        "max_output_tokens": differs("max_output_tokens", 5),
        "metadata": differs("metadata", {"a": "b"}),
        "model": ({"model": "own"}, {"model": "own", "input": "Ho"}),
        "previous_response_id": differs("previous_response_id", "resp_1"),
        "store": differs("store", False),
        "stream": differs("stream", True),
        "temperature": differs("temperature", 0.5),
        "top_p": differs("top_p", 0.5),
        "top_logprobs": differs("top_logprobs", 3, {"include": [LOGPROBS]}),
        "truncation": differs("truncation", "auto"),
        "text.format.type": (FLAT_SCHEMA, {}),
        "text.format.schema": (FLAT_SCHEMA, beside("text.format.schema", {"a": 1}, FLAT_SCHEMA)),
        "text.format.strict": differs("text.format.strict", True, FLAT_SCHEMA),
        "tool_choice.mode": (ALLOWED_FLAT, beside("tool_choice.mode", "required", ALLOWED_FLAT)),
        "tool_choice.tools": (ALLOWED_FLAT, FUNCTION),
        "tools[].strict": differs("tools[].strict", True, FUNCTION),
        "input[].type": (CALLED, MESSAGE),
        "input[].role": (ANSWERED, MESSAGE),
        "input[].content": (MESSAGE, ANSWERED),
        "input[].content[].type": (MESSAGE, LOOKED),
        "input[].content[].text": (MESSAGE, beside("input[].content[].text", "b", MESSAGE)),
        "input[].content[].refusal": (
            {"input": [{**ANSWER, "content": [{"type": "refusal", "refusal": "No."}]}]},
            ANSWERED,
        ),
        "input[].content[].image_url": (LOOKED, MESSAGE),
        "input[].content[].detail": differs("input[].content[].detail", "low", LOOKED),
        "input[].call_id": ({"input": [FLAT_CALL]}, MESSAGE),
        "input[].namespace": ({"input": [{**FLAT_CALL, "namespace": "a"}]}, {"input": [FLAT_CALL]}),
        "input[].name": ({"input": [FLAT_CALL]}, {"input": [{**FLAT_CALL, "name": "g"}]}),
        "input[].arguments": (
            {"input": [FLAT_CALL]},
            {"input": [{**FLAT_CALL, "arguments": '{"a": 1}'}]},
        ),
        "input[].output": (RESULT, {"input": [{**FLAT_RESULT, "output": "6"}]}),
        "input[].output[].type": (IN_PARTS, RESULT),
        "input[].output[].text": (IN_PARTS, beside("input[].output[].text", "b", IN_PARTS)),
    },
    {
        "input[].content[]": MESSAGE,
        "input[].output[]": IN_PARTS,
        "input[]": RESULT,
        "tools[]": FUNCTION,
        "tool_choice": {**FUNCTION, "tool_choice": FLAT},
        "text": FLAT_SCHEMA,
    },
    (
        *("access_programs", "background_options", "context_management", "conversation", "image"),
        *("moderation", "prompt", "prompt_cache_options", "reasoning", "input", "tools"),
        *("stream_options", "metadata", "tool_choice.tools", "text.format.schema"),
        *("tools[].parameters", "tools[].output_schema", "input[].caller"),
        *(f"input[].content[].{name}" for name in ("annotations", "logprobs")),
        *(f"input[].{name}[].prompt_cache_breakpoint" for name in ("content", "output")),
    ),
)
ENDPOINTS = {
    "chat": Endpoint(
        [
            ("", completion_create_params.CompletionCreateParamsNonStreaming),
            ("", completion_create_params.CompletionCreateParamsStreaming),
        ],
        read,
        CHAT,
        HONOURED,
        {
            "messages[]": user(),
            "messages[].content[]": user(TEXT),
            "messages[].content[].input_audio": user(sound()),
            **{f"messages[].content[].{kind}_url": user(part(kind)) for kind in MEDIA_KINDS},
            "tools[]": {"tools": [TOOL]},
            "tool_choice": {"tools": [TOOL], "tool_choice": TOOL},
            "response_format": IN_JSON,
        },
        CLOSED,
    ),
    "speech": Endpoint(
        [("", speech_create_params.SpeechCreateParams)],
        read_speech,
        SPEECH,
        {
            "input": differs("input", "Ho."),
            "response_format": differs("response_format", "wav"),
            "speed": differs("speed", 2),
            "stream": differs("stream", True),
            "stream_format": differs("stream_format", "sse"),
            "voice": differs("voice", "Chelsie"),
            "voice.id": differs("voice", {"id": "Chelsie"}),
        },
    ),
    "transcription": Endpoint(
        [
            ("", transcription_create_params.TranscriptionCreateParamsNonStreaming),
            ("", transcription_create_params.TranscriptionCreateParamsStreaming),
        ],
        read_transcription,
        TRANSCRIPTIONS,
        {
            "chunking_strategy": differs("chunking_strategy", "auto"),
            "include": differs("include", ["logprobs"]),
            "response_format": differs("response_format", "text"),
            "stream": differs("stream", True),
            "temperature": differs("temperature", 0.5),
            "timestamp_granularities": differs(
                "timestamp_granularities", ["segment"], {"response_format": "verbose_json"}
            ),
        },
        closed=["chunking_strategy"],
    ),
    "input items": Endpoint(
        [("", input_item_list_params.InputItemListParams)],
        read_items_query,
        INPUT_ITEMS,
        {
            "after": differs("after", "msg_1"),
            "limit": differs("limit", 5),
            "order": differs("order", "asc"),
        },
    ),
    "session": SESSION,
    "transcribing session": TRANSCRIBING,
    "response.create": RESPONSE_CREATE,
    "item": SOCKET_ITEM,
    "response": RESPONSE,
}
# Values that a field of these names may have, where "x" would be refused as such.
VALUES: Mapping[str, Any] = {
    **{"languages": ["x"], "keywords": ["x"], "strength": 0.5, "delay": "low"},
    **{"noise_reduction": {"type": "near_field"}, "model": "gpt-4o"},
    f"{REALTIME} prompt": {"id": "p"},
    f"{REALTIME} audio.input.noise_reduction.type": "near_field",
    f"{REALTIME} audio.output.format": {"type": "audio/pcmu"},
    f"{REALTIME} audio.output.format.type": "audio/pcmu",
    f"{REALTIME} audio.output.format.rate": 16000,
    **{"annotations": [{"a": 1}], "logprobs": [{"a": 1}], "status": "completed", "type": "x"},
    **{"include": ["reasoning.encrypted_content"], "verbosity": "low", "max_tool_calls": 5},
    **{"include_obfuscation": True, f"{CHAT} prediction": {"type": "content"}},
}


def body_of(endpoint: Endpoint, path: str) -> Json:
    """Return a body that has a field of a path, with some value."""
    base = max((at for at in endpoint.bases if path.startswith(at)), key=len, default=None)
    last = path.rpartition(".")[2].removesuffix("[]")
    value = VALUES.get(f"{endpoint.table} {path}", VALUES.get(last, "x"))
    return beside(path, value, {} if base is None else endpoint.bases[base])


def is_one_of_the_three(endpoint: Endpoint, path: str) -> bool:
    """Return whether a field's effect is seen in what is asked, or it is counted, or refused by its
    name.
    """
    if path in endpoint.honoured:
        body, other = endpoint.honoured[path]
        return endpoint.read(body)[0] != endpoint.read(other)[0]
    if path in with_parents(endpoint.honoured):
        return True
    last = path.rpartition(".")[2].removesuffix("[]")
    counted = [path[:end] for end in range(len(path) + 1) if path[:end] in FIELDS[endpoint.table]]
    try:
        found = endpoint.read(body_of(endpoint, path))[1]
    except ApiError as error:
        named = last in str(error.param) or last in error.message
        of_value = "Input should be" in error.message
        return named and path not in FIELDS[endpoint.table] and not of_value
    return bool(set(counted) & set(found))


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_path_of_openais_requests_is_one_of_the_three(name) -> None:
    endpoint = ENDPOINTS[name]
    assert [path for path in endpoint.paths if not is_one_of_the_three(endpoint, path)] == []


def test_a_responses_sound_has_the_sessions_format() -> None:
    for given in ({"type": "audio/pcm"}, {"type": "audio/pcm", "rate": 16000}, {"rate": 16000}):
        body: Json = {"audio": {"output": {"format": given}}}
        response_config(body, VOICES, SoundFormat(rate=16000))
    for wrong in ({"type": "audio/pcma"}, {"rate": 24000}):
        with pytest.raises(
            ApiError, match="must have the session's format: type audio/pcm, rate 16000"
        ):
            body = {"audio": {"output": {"format": wrong}}}
            response_config(body, VOICES, SoundFormat(rate=16000))


SENT_BACK: Mapping[str, Json] = {
    f"{CHAT} messages[].*": assistant(reasoning_content="because", parsed={"a": 1}),
    f"{CHAT} messages[].audio.*": assistant(audio={"id": "a", "data": "AAAA", "expires_at": 5}),
    f"{CHAT} messages[].tool_calls[].*": assistant(tool_calls=[{**CALL, "index": 1}]),
    f"{CHAT} messages[].tool_calls[].function.*": assistant(
        tool_calls=[{**CALL, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}]
    ),
    f"{RESPONSES} input[].*": {"input": [{**FLAT_CALL, "parsed_arguments": {}, "colour": "red"}]},
    f"{ITEM} *": {**SAID, "colour": "red"},
}


def test_every_field_in_the_table_is_counted() -> None:
    for name in ENDPOINTS.keys() - {"transcribing session", "response.create"}:
        endpoint = ENDPOINTS[name]
        for path in {*FIELDS[endpoint.table]} - {"audio.output.speed"}:  # it has its effect here
            body = SENT_BACK.get(f"{endpoint.table} {path}") or body_of(endpoint, path)
            assert path in endpoint.read(body)[1]
            assert path not in endpoint.read({})[1]


@pytest.mark.parametrize("name", ENDPOINTS)
def test_a_field_that_nobody_knows_is_refused(name) -> None:
    endpoint = ENDPOINTS[name]
    bodies = [{"colour": "red"}]
    bodies += [beside(f"{at}.colour", "red", base) for at, base in endpoint.bases.items() if at]
    for body in bodies:
        with pytest.raises(ApiError, match="colour"):
            endpoint.read(body)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({**SAYS["content"][0], "image_url": URL}, "image_url"),
        ({**SEES["content"][0], "text": "a"}, "text"),
        ({**HEARS["content"][0], "text": "a"}, "text"),
        ({**SPOKE["content"][0], "audio": PCM}, "audio"),
    ],
)
def test_a_part_of_a_socket_item_has_no_field_of_another_type(part, name) -> None:
    role = "assistant" if part["type"] == "output_audio" else "user"
    with pytest.raises(ApiError, match=f"a part of type {part['type']} has .* alone") as refused:
        read_socket_item({"role": role, "content": [part]})
    assert refused.value.param == f"item.content[0].{name}"


# Fields of a message in Python.
BESIDE: Mapping[str, Json] = {"role": {}, "content": {}, "name": {"name": "Ann"}}
OF_ROLES: Mapping[str, Mapping[str, Json]] = {
    "system": BESIDE,
    "user": BESIDE,
    "assistant": {**BESIDE, "tool_calls": {"tool_calls": [CALL]}},
    "tool": {**BESIDE, "tool_call_id": {"tool_call_id": "c"}},
}


def read_message(message: Json) -> Json:
    return MessageReader([], lambda kind, item, where: None).message(message, "messages[0]")


@pytest.mark.parametrize("role", OF_ROLES)
def test_a_message_in_python_has_the_fields_of_its_role_alone(role) -> None:
    plain = {"role": role, "content": "Hi"}
    for name, given in OF_ROLES[role].items():
        honoured = name not in ("name", "tool_call_id")
        assert (read_message(plain | given) == plain | given) == honoured
        assert honoured or read_message(plain | given) == plain
    for name in {"tool_calls", "tool_call_id", "refusal", "colour"} - set(OF_ROLES[role]):
        words = rf"^messages\[0\] has an unknown field '{name}'\..* It may have role, content"
        for value in ("x", 0, False, {}, [], np.zeros(2)):
            with pytest.raises(MessageError, match=words):
                read_message({**plain, name: value})
        assert read_message({**plain, name: None}) == plain
