"""Sockets at /v1/realtime, and at DashScope's path: acceptance, and limit of their number."""

from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from qwen3_omni_neuron.serving.edge.sending import AnswerSender
from qwen3_omni_neuron.serving.openai.bodies import check_model
from qwen3_omni_neuron.serving.openai.errors import RETRY_S, ApiError
from qwen3_omni_neuron.serving.openai.fields import REALTIME
from qwen3_omni_neuron.serving.realtime.connection import Connection
from qwen3_omni_neuron.serving.realtime.dashscope import DASHSCOPE_HEADER, DASHSCOPE_PATH
from qwen3_omni_neuron.serving.realtime.live_session import LiveSession
from qwen3_omni_neuron.serving.realtime.session_config import SessionType
from qwen3_omni_neuron.serving.service import Service

PATH = "/v1/realtime"
PATHS = (PATH, DASHSCOPE_PATH)


class RealtimeSockets:
    """ASGI application for all sessions of a server. For one event loop."""

    def __init__(self, service: Service):
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one session. Raises ApiError before it has begun."""
        service, context = self._service, scope["context"]
        answer: AnswerSender = scope["answer"]
        asked = parse_qs(scope["query_string"].decode("latin-1"))
        if "model" in asked:
            model = asked["model"][0]
            check_model(service, model)
            service.count_without_effect(REALTIME, {"model": model})
        kind: SessionType = "realtime"
        if asked.get("intent") == ["transcription"]:
            kind = "transcription"
        omni = service.model.take()
        if service.model.sessions_end_in_s is not None:
            message = "the server ends: open the session again."
            raise ApiError(503, message, "model_draining", retry_after_s=RETRY_S)
        place = service.sessions.place(context.owner)
        service.metrics.realtime_sessions.inc()
        pool = ThreadPoolExecutor(1, "realtime")
        try:
            offered = scope["subprotocols"]
            chosen = "realtime" if "realtime" in offered else None
            await receive()  # the message "websocket.connect"
            await answer.send({"type": "websocket.accept", "subprotocol": chosen})
            dashscope = context.path == DASHSCOPE_PATH or DASHSCOPE_HEADER in dict(scope["headers"])
            connection = Connection(send, pool, service, context, dashscope)
            await LiveSession(connection, omni, receive, kind).serve()
        finally:
            pool.shutdown(wait=False)
            place.leave()
            service.metrics.realtime_sessions.dec()
