"""Parts of the OpenAPI document, and advice for unknown paths."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, get_origin

from pydantic import BaseModel

from qwen3_omni_neuron.errors import REMOVED_PATHS, did_you_mean, removed
from qwen3_omni_neuron.options import REQUEST_OPTIONS, Option
from qwen3_omni_neuron.prompt.media.fields import fields_of

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "What is six plus two?"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "mp3"},
    },
    "/v1/responses": {"input": "What is six plus two?"},
    "/v1/completions": {"prompt": "One, two, three,", "max_tokens": 20},
    "/v1/audio/speech": {"input": "three five seven", "voice": "alloy", "response_format": "mp3"},
    "/v1/audio/transcriptions": {"file": "speech.wav", "response_format": "text"},
    "/v1/realtime/client_secrets": {"expires_after": {"anchor": "created_at", "seconds": 600}},
}
"""Example bodies by path; a form names a file of its sender."""


class Problem(BaseModel):
    """An error. type: kind of error; code: short name; param: field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Body of an answer that is an error."""

    error: Problem


def takes_json(model: Any) -> dict[str, Any]:
    """Return a route's JSON body and errors. model: the body's class."""
    schema = _schema(model)
    schema.pop("$defs", None)
    schema["properties"] = {**dict(model.further), **schema["properties"]}
    schema["additionalProperties"] = False
    return _takes("application/json", schema)


def takes_query(model: type[BaseModel]) -> dict[str, Any]:
    """Return a route's query and errors."""
    fields = _schema(model)["properties"].items()
    parameters = [{"name": name, "in": "query", "schema": field} for name, field in fields]
    return {"openapi_extra": {"parameters": parameters}, "responses": errors_of(400, 404)}


def takes_form(model: type[BaseModel], file: str) -> dict[str, Any]:
    """Return a route's multipart body and errors. file: the file's field."""
    schema = _schema(model)
    fields = schema.pop("properties")
    # Lists' names have brackets, as OpenAI's clients write them.
    named = {n + "[]" if f.get("type") == "array" else n: f for n, f in fields.items()}
    schema["properties"] = {file: {"type": "string", "format": "binary"}, **named}
    schema["required"] = [file, *schema.get("required", ())]
    return _takes("multipart/form-data", schema)


def _takes(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    body = {"required": True, "content": {media_type: {"schema": schema}}}
    errors = errors_of(400, 404, 408, 413, 504)
    return {"openapi_extra": {"requestBody": body}, "responses": errors}


def schema_of_option(option: Option) -> dict[str, Any]:
    """Return the schema of an option of the API."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    kind = "object" if get_origin(option.value_type) is Mapping else names.get(option.value_type)
    schema: dict[str, Any] = {"type": kind} if kind else {"type": "array"}
    if kind is None:
        schema["items"] = {"type": "integer"}
    values = option.values
    phrase = "" if values is None else f"; {values.phrase}"
    description = f"{option.help}{phrase}; default: {option.default_text}"
    return {**schema, **(values.limits if values else {}), "description": description}


def schemas_of_options(names: Collection[str]) -> dict[str, Any]:
    """Return the schemas of options of a request, by name."""
    return {one.name: schema_of_option(one) for one in REQUEST_OPTIONS if one.name in names}


def with_item_fields(kind: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds an item's fields to its part's schema."""

    def add(schema: dict[str, Any]) -> None:
        for name, field in fields_of(kind, over_http=True).items():
            schema["properties"][name] = {**field.values.schema, "description": field.help}

    return add


def schemas_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas that `takes_json` refers to, by name."""
    found = _schema(model).get("$defs", {})
    return {f"{model.__name__}_{name}": schema for name, schema in found.items()}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    reference = f"#/components/schemas/{model.__name__}_{{model}}"
    return model.model_json_schema(ref_template=reference)


def errors_of(*more: int) -> dict[int | str, dict[str, Any]]:
    """Return an endpoint's possible errors. more: statuses beside the usual ones."""
    return {status: {"model": ErrorAnswer} for status in sorted((401, 403, 429, 500, 503, *more))}


_CHAT = "/v1/chat/completions"
_LISTED = (
    *(_CHAT, "/v1/responses", "/v1/completions", "/v1/audio/speech"),
    *("/v1/audio/transcriptions", "/v1/models"),
)
_SERVED = f"This server has {', '.join(_LISTED)} and the WebSocket /v1/realtime."
_OWN_FILES = f"Nothing is stored here: send files as parts of a message to {_CHAT}."
_OWN_API = (
    "This path belongs to another API: choose your client's OpenAI-compatible provider, with a "
    "base URL that ends with /v1."
)
ADVICE: Mapping[str, str] = {
    "/v1/embeddings": "The model computes no embeddings: use another server for them.",
    "/v1/rerank": "The model can't rank: use another server for it.",
    "/v1/moderations": "The model can't moderate: ask it in a message, or use another server.",
    "/v1/images": f"The model reads images but can't draw: send them in a message to {_CHAT}.",
    "/v1/videos": f"The model reads videos but can't make any: send them in a message to {_CHAT}.",
    "/v1/live/sessions": "Use the WebSocket /v1/realtime, which hears and speaks in turns.",
    "/v1/realtime": "Connect to the WebSocket /v1/realtime with the API key, or a secret of "
    "/v1/realtime/client_secrets: there is no WebRTC, so choose your client's WebSocket transport.",
    "/v1/responses": "A response is read and deleted by its id: GET and DELETE /v1/responses/ID, "
    "and GET /v1/responses/ID/input_items. To cancel it, disconnect.",
    "/v1/conversations": "POST /v1/responses continues a response by previous_response_id.",
    "/v1/assistants": "POST /v1/responses has instructions and tools, and stores responses.",
    "/v1/threads": "POST /v1/responses continues a response by previous_response_id.",
    "/v1/files": _OWN_FILES,
    "/v1/uploads": _OWN_FILES,
    "/v1/vector_stores": _OWN_FILES,
    "/v1/batches": f"Send all requests to {_CHAT} at once: they wait in its queue.",
    "/v1/fine_tuning": "The server can't train: merge an adapter with --adapter at its start.",
    "/v1/messages": _OWN_API,
    "/api": _OWN_API,
    "/v1beta": _OWN_API,
    "/v1/v1": "The base URL ends with one /v1.",
}
"""Advice by the beginning of the path."""
_WITHOUT_VERSION = ("/chat", "/responses", "/completions", "/audio", "/models", "/realtime")


def advice_for(path: str) -> str:
    """Return advice for a client of an unknown path."""
    if path in REMOVED_PATHS:
        return f"{removed(path, REMOVED_PATHS)} {_SERVED}"
    if _begins(path, *_WITHOUT_VERSION):
        return "The base URL of an OpenAI client ends with /v1 here."
    found = [advice for known, advice in ADVICE.items() if _begins(path, known)]
    return found[0] if found else f"{did_you_mean(path, _LISTED)} {_SERVED}".lstrip()


def _begins(path: str, *known: str) -> bool:
    return path.startswith(tuple(f"{name}/" for name in known)) or path in known
