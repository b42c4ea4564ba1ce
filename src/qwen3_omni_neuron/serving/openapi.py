"""Pieces of the OpenAPI document: bodies that are read by hand, and errors."""

from typing import Any

from pydantic import BaseModel

_STATUSES = {
    400: "The model can't take a value: a medium that can't be read, a prompt that is too long",
    401: "No valid API key",
    404: "No such model",
    408: "The body took too long",
    413: "The body or a medium is too large",
    422: "The body is no JSON, or a field has a value that is not taken",
    429: "Too many requests; Retry-After says when",
    500: "The server failed",
    503: "Loading, draining or restarting; Retry-After says when",
    504: "The request took longer than the server allows",
}
_WITHOUT_BODY = (401, 429, 500, 503)
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a JSON body."""
    schema = model.model_json_schema(
        ref_template=f"#/components/schemas/{model.__name__}_{{model}}"
    )
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def schemas_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas that `body_of` refers to, by name."""
    schema = model.model_json_schema(
        ref_template=f"#/components/schemas/{model.__name__}_{{model}}"
    )
    return {f"{model.__name__}_{name}": found for name, found in schema.get("$defs", {}).items()}


def errors_of(with_body: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the errors that an endpoint may answer with."""
    return {
        status: {
            "description": text,
            "content": {"application/json": {"schema": ERROR_SCHEMA}},
        }
        for status, text in _STATUSES.items()
        if with_body or status in _WITHOUT_BODY
    }
