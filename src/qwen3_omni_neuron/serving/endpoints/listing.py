"""GET /v1/models and /v1/audio/voices: the model and its voices."""

from typing import Any

from fastapi import APIRouter, Request

from qwen3_omni_neuron.serving.openai.bodies import no_model
from qwen3_omni_neuron.serving.openai.openapi import errors_of
from qwen3_omni_neuron.serving.service import Service

router = APIRouter()


@router.get("/v1/models", responses=errors_of())
async def models(request: Request) -> dict[str, Any]:
    """List the one model."""
    return {"object": "list", "data": [_model(request.app.state.service)]}


@router.get("/v1/models/{name:path}", responses={**errors_of(), 404: errors_of(True)[404]})
async def model(request: Request, name: str) -> dict[str, Any]:
    """Describe the model.

    With what its checkpoint says of itself, if anything: introduction, and questions to try.
    """
    service: Service = request.app.state.service
    if name != service.model.name:
        raise no_model(service, name)
    return _model(service)


@router.get("/v1/audio/voices", responses=errors_of())
async def voices(request: Request) -> dict[str, list[dict[str, str]]]:
    """List the voices of the model; none where it has no talker."""
    service: Service = request.app.state.service
    names = service.model.take().info.speakers
    # As other servers have it, and as Open WebUI wants it; OpenAI has no such list.
    return {"voices": [{"id": name, "name": name} for name in names]}


def _model(service: Service) -> dict[str, Any]:
    model = service.model
    found = {
        "id": model.name,
        "object": "model",
        "created": int(model.created),
        "owned_by": "qwen3-omni-neuron",
    }
    info = None if model.omni is None else model.omni.info
    if info is None or not info.introduction:
        return found
    return {**found, "introduction": info.introduction, "questions": list(info.questions)}
