"""GET /health, /ready and /metrics, for the server's operator."""

import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from qwen3_omni_neuron.engines.process.heap import resident_mb
from qwen3_omni_neuron.serving.model import ServedModel
from qwen3_omni_neuron.serving.service import Service

router = APIRouter()


@router.get("/health", responses={503: {"description": "stalled or failed"}})
async def health(request: Request) -> JSONResponse:
    """Say that the process runs; 503 where only a new start can help, with the reason."""
    fault = request.app.state.service.model.fault
    if fault is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "failed", "reason": fault}, 503)


@router.get("/ready", responses={503: {"description": "loading, stalled, draining or failed"}})
async def ready(request: Request) -> JSONResponse:
    """Say whether requests are answered: 200, or 503 while loading, stalled, draining, or failed.

    While the model loads, seconds and memory_mb say how far it is.
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
