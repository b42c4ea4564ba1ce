"""Paths that clients know and this server does not serve, each with what they can use instead."""

from collections.abc import Mapping

from qwen3_omni_neuron.errors import did_you_mean
from qwen3_omni_neuron.removed import PATHS, removed

_CHAT = "/v1/chat/completions"
_LISTED = (
    *(_CHAT, "/v1/responses", "/v1/completions", "/v1/audio/speech"),
    *("/v1/audio/transcriptions", "/v1/models"),
)
_SERVED = f"Served are {', '.join(_LISTED)} and the WebSocket /v1/realtime."
_OWN_FILES = f"Nothing is stored here: send files as parts of a message to {_CHAT}."
_OWN_API = (
    "It is of another API: choose the OpenAI-compatible provider of your client, with a base URL "
    "that ends with /v1."
)
ADVICE: Mapping[str, str] = {
    "/v1/embeddings": "The model makes no embeddings: name another server for them.",
    "/v1/rerank": "The model ranks nothing: name another server for it.",
    "/v1/moderations": "The model rates no texts: ask it in a message, or name another server.",
    "/v1/images": f"The model sees images and draws none: send them in a message to {_CHAT}.",
    "/v1/videos": f"The model sees videos and makes none: send them in a message to {_CHAT}.",
    "/v1/live/sessions": "Take the WebSocket /v1/realtime, which hears and speaks in turns.",
    "/v1/realtime": "Connect to the WebSocket /v1/realtime with the API key, or a secret of "
    "/v1/realtime/client_secrets: there is no WebRTC, so choose your client's WebSocket transport.",
    "/v1/responses": "A response is read and deleted by its id: GET and DELETE /v1/responses/ID, "
    "and GET /v1/responses/ID/input_items. It can't be cancelled, as its client waits for it.",
    "/v1/conversations": "POST /v1/responses continues a response by previous_response_id.",
    "/v1/assistants": "POST /v1/responses has instructions and tools, and remembers.",
    "/v1/threads": "POST /v1/responses continues a response by previous_response_id.",
    "/v1/files": _OWN_FILES,
    "/v1/uploads": _OWN_FILES,
    "/v1/vector_stores": _OWN_FILES,
    "/v1/batches": f"Send the requests to {_CHAT} at the same time: they wait in its queue.",
    "/v1/fine_tuning": "The model is as it was loaded.",
    "/v1/messages": _OWN_API,
    "/api": _OWN_API,
    "/v1beta": _OWN_API,
    "/v1/v1": "The base URL ends with one /v1.",
}
"""What to do instead, by the beginning of the path."""
_WITHOUT_VERSION = ("/chat", "/responses", "/completions", "/audio", "/models", "/realtime")


def advice_for(path: str) -> str:
    """Return what a client of an unknown path can do."""
    if path in PATHS:
        return f"{removed(path, PATHS)} {_SERVED}"
    if _begins(path, *_WITHOUT_VERSION):
        return "The base URL of an OpenAI client ends with /v1 here."
    found = [advice for known, advice in ADVICE.items() if _begins(path, known)]
    return found[0] if found else f"{did_you_mean(path, _LISTED)} {_SERVED}".lstrip()


def _begins(path: str, *known: str) -> bool:
    return path.startswith(tuple(f"{name}/" for name in known)) or path in known
