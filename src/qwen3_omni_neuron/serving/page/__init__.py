"""The page at /, on which people talk with the model: its files, read once, under fixed names."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_TYPES |= {".svg": "image/svg+xml"}
_NAMES = (
    *("style.css", "icon.svg", "main.js", "realtime.js", "conversation.js", "sound.js"),
    *("images.js", "capture.worklet.js", "playback.worklet.js"),
)
FILES = {"/": "index.html", **{f"/page/{name}": name for name in _NAMES}}
"""Files by their paths. There are no others."""
# All that the page needs comes from its own server, and no other page may frame it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "permissions-policy": "camera=(self), microphone=(self)",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_router() -> APIRouter:
    """Make the endpoints of the page. Reads its files."""
    router = APIRouter()
    for path, name in FILES.items():
        router.add_api_route(path, _answer(_FOLDER / name), include_in_schema=False)
    return router


def _answer(file: Path) -> Callable[[], Awaitable[Response]]:
    content, kind = file.read_bytes(), _TYPES[file.suffix]

    async def answer() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return answer
