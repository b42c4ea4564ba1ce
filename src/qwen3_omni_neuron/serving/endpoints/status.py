"""GET endpoints of the server: model, voices, health and metrics."""

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from qwen3_omni_neuron.engines.process.heap import resident_mb
from qwen3_omni_neuron.serving.model import ServedModel
from qwen3_omni_neuron.serving.openai.bodies import check_model
from qwen3_omni_neuron.serving.openai.openapi import errors_of
from qwen3_omni_neuron.serving.service import Service

router = APIRouter()


@router.get("/v1/models", responses=errors_of())
async def models(request: Request) -> dict[str, Any]:
    """List the one model."""
    return {"object": "list", "data": [_model(request.app.state.service)]}


@router.get("/v1/models/{name:path}", responses=errors_of(404))
async def model(request: Request, name: str) -> dict[str, Any]:
    """Describe the model, by any name that a chat may use.

    Includes whether it can transcribe a spoken question, and the checkpoint's introduction and
    example questions, if any.
    """
    service: Service = request.app.state.service
    check_model(service, name)
    return _model(service)


@router.get("/v1/audio/voices", responses=errors_of())
async def voices(request: Request) -> dict[str, list[dict[str, str]]]:
    """List the model's voices, none without a talker."""
    service: Service = request.app.state.service
    names = service.model.take().info.speakers
    # As other servers have it, and Open WebUI expects it; OpenAI has no such list.
    return {"voices": [{"id": name, "name": name} for name in names]}


@router.get("/health", responses={503: {"description": "stalled or failed"}})
async def health(request: Request) -> JSONResponse:
    """Report that the process runs, or 503 and the reason if it must be restarted."""
    fault = request.app.state.service.model.fault
    if fault is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "failed", "reason": fault}, 503)


@router.get("/ready", responses={503: {"description": "loading, stalled, draining or failed"}})
async def ready(request: Request) -> JSONResponse:
    """Report whether requests are answered: 200, or 503 if loading, stalled, draining, failed.

    While the model loads, seconds and memory_mb show its progress.
    """
    model: ServedModel = request.app.state.service.model
    content = {
        "status": model.state,
        "model": model.name,
        "seconds": round(time.time() - model.created, 1),
        "memory_mb": resident_mb(),
    }
    return JSONResponse(content, 200 if model.ready else 503)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text form."""
    service: Service = request.app.state.service
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _model(service: Service) -> dict[str, Any]:
    model, omni = service.model, service.model.omni
    info = None if omni is None else omni.info
    # Load tools and gateways read vLLM's root and max_model_len.
    found = {
        "id": model.name,
        "object": "model",
        "created": int(model.created),
        "owned_by": "qwen3-omni-neuron",
        "root": model.name,
        "max_model_len": None if info is None else info.context_length,
        # Without an instruction it answers speech as a question.
        "transcribes_questions": None if omni is None else omni.transcription_instruction != "",
    }
    if info is None or not info.introduction:
        return found
    return {**found, "introduction": info.introduction, "questions": list(info.questions)}
