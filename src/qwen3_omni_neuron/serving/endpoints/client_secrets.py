"""POST /v1/realtime/client_secrets: short-lived secrets for clients without keys."""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.endpoints.answer import parts_of
from qwen3_omni_neuron.serving.openai.bodies import ClientObject, parse_json
from qwen3_omni_neuron.serving.openai.openapi import takes_json
from qwen3_omni_neuron.serving.openai.reply import new_id
from qwen3_omni_neuron.serving.realtime.session_config import first_config, shown, updated
from qwen3_omni_neuron.serving.realtime.turn_detector import judges
from qwen3_omni_neuron.serving.service import Service

router = APIRouter()
Json = dict[str, Any]


class ExpiresAfter(ClientObject):
    """Lifetime of a secret in seconds."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=10, le=7200)] = 600


class ClientSecretRequest(ClientObject):
    """Body of POST /v1/realtime/client_secrets. `session` is read by `session_config`."""

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None


@router.post("/v1/realtime/client_secrets", **takes_json(ClientSecretRequest))
async def client_secrets(request: Request) -> Json:
    """Create a secret that opens realtime sessions with these settings until it expires.

    The secret is signed, not stored: every server with the same key accepts it.
    """
    service, context = parts_of(request)
    return await service.readers.run(context.owner, _made, service, context)


def _made(service: Service, context: Context) -> Json:
    wanted = parse_json(ClientSecretRequest, context.body or b"{}")
    context.release_body()
    given = wanted.session or {}
    expires_at = int(time.time()) + (wanted.expires_after or ExpiresAfter()).seconds
    value = service.keys.secret(context.owner, given, expires_at)
    voices = service.voices_of(context.omni)
    first = first_config(service.model.name, voices)
    config = updated(first, given, voices, judges(context.omni))
    kind = "session" if config.answers else "transcription_session"
    session = {"id": new_id("sess_"), "object": f"realtime.{kind}", **shown(config)}
    return {"value": value, "expires_at": expires_at, "session": session}
