"""The web page at / for conversations: files with fixed paths, read once."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

_FOLDER = Path(__file__).parent
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_NAMES = sorted(file.name for file in _FOLDER.iterdir() if file.suffix in _TYPES)
FILES = {"/": "index.html", **{f"/page/{name}": name for name in _NAMES}}
"""All files of the page by their URL paths."""
# The page loads only from its own server, and no other page may embed it.
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
    """Read the files of the page, and return its endpoints."""
    router = APIRouter()
    for path, name in FILES.items():
        router.add_api_route(path, _answer(_FOLDER / name), include_in_schema=False)
    return router


def _answer(file: Path) -> Callable[[], Awaitable[Response]]:
    content, kind = file.read_bytes(), _TYPES.get(file.suffix, "text/html")

    async def answer() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return answer
