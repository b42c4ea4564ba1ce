"""The application: endpoints behind the gate, and errors in OpenAI's format."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from qwen3_omni_neuron import __version__
from qwen3_omni_neuron.errors import Qwen3OmniError
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.edge.gate import Gate
from qwen3_omni_neuron.serving.endpoints import (
    chat,
    client_secrets,
    completions,
    response_api,
    speech,
    status,
    transcriptions,
)
from qwen3_omni_neuron.serving.endpoints.client_secrets import ClientSecretRequest
from qwen3_omni_neuron.serving.endpoints.completions import CompletionRequest
from qwen3_omni_neuron.serving.endpoints.speech import SpeechRequest
from qwen3_omni_neuron.serving.openai.chat_request import ChatRequest
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.openapi import EXAMPLES, advice_for, schemas_of
from qwen3_omni_neuron.serving.openai.responses import ResponseRequest
from qwen3_omni_neuron.serving.page import page_router
from qwen3_omni_neuron.serving.reference import reference_router
from qwen3_omni_neuron.serving.service import Service

ENDPOINTS = (
    *(chat.router, response_api.router, completions.router),
    *(speech.router, transcriptions.router, client_secrets.router, status.router),
)
BODIES = (ChatRequest, ResponseRequest, CompletionRequest, SpeechRequest, ClientSecretRequest)


class _Application(FastAPI):
    """FastAPI for routes and their document: `serving` itself reads bodies and reports errors."""

    def openapi(self) -> dict[str, Any]:
        """Return the document with bodies' schemas and examples, in some 0.2 s.

        Not stored: another thread might see it incomplete.
        """
        made = get_openapi(title=self.title, version=self.version, routes=self.routes)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        for body in BODIES:
            schemas.update(schemas_of(body))
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's, unused
            schemas.pop(name, None)
        for path, methods in made["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                for body in operation.get("requestBody", {}).get("content", {}).values():
                    body["example"] = EXAMPLES[path]
        return made


def make_app(service: Service) -> Gate:
    """Return the application of one server."""
    # FastAPI's own path would build the document on the event loop.
    app = _Application(title="qwen3-omni-neuron", version=__version__, openapi_url=None)
    app.state.service = service
    for endpoint in (*ENDPOINTS, page_router(), reference_router(app.openapi)):
        app.include_router(endpoint)
    for kind in (ApiError, Qwen3OmniError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    return Gate(app, service)


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    service: Service = request.app.state.service
    context: Context = request.scope["context"]
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):  # unknown path or method
        path = request.url.path
        message = f"{context.method} {path[:200]}: {error.detail}."
        if error.status_code == 404:
            message = f"{message} {advice_for(path)}"
        headers |= error.headers or {}
        error = ApiError(error.status_code, message, "unknown_url")
    refusal = service.failed(error, context)
    context.refused(refusal)
    return JSONResponse(refusal.body, refusal.status, {**headers, **refusal.headers})
