"""The OpenAPI document, and the page at /docs: endpoints with fields, limits and examples.

FastAPI's own page loads code from another host. page/docs.js sends the forms of this one.
"""

import base64
import hashlib
import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qwen3_omni_neuron.serving.json_bytes import to_json

DOCUMENT, PAGE = "/openapi.json", "/docs"
PATHS = (DOCUMENT, PAGE)
_STYLE = """
:root { color-scheme: light dark; --line: rgb(128 128 128 / 40%); --back: rgb(128 128 128 / 12%) }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1rem }
code, pre { font: 0.9em/1.5 ui-monospace, monospace; overflow-wrap: anywhere }
pre { background: var(--back); padding: 0.75rem; white-space: pre-wrap }
section { border-top: 1px solid var(--line); margin-top: 2rem }
table { border-collapse: collapse; width: 100%; table-layout: fixed }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.5rem 0.3rem 0; text-align: left }
th, td { vertical-align: top; overflow-wrap: anywhere }
form { display: grid; gap: 0.5rem; justify-items: start }
textarea { box-sizing: border-box; width: 100%; font: 0.9em/1.5 ui-monospace, monospace }
output { width: 100% }
output pre { max-height: 24rem; overflow: auto }
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; "
    "script-src 'self'; connect-src 'self'; media-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_JSON, _FORM = "application/json", "multipart/form-data"
_Schema = Mapping[str, Any]


def reference_router(document: Callable[[], Mapping[str, Any]]) -> APIRouter:
    """Return the endpoints of both. document: called in a thread at the first request."""
    router, lock = APIRouter(), threading.Lock()
    made: dict[str, bytes] = {}

    def make() -> None:
        with lock:
            if not made:
                found = document()
                page = reference_page(found).encode()
                made.update({DOCUMENT: to_json(found), PAGE: page})  # last: it is complete

    def add(path: str, media_type: str, headers: Mapping[str, str]) -> None:
        async def answer(request: Request) -> Response:
            if path not in made:
                await request.app.state.service.readers.run("", make)
            return Response(made[path], media_type=media_type, headers=headers)

        router.add_api_route(path, answer, include_in_schema=False)

    add(DOCUMENT, _JSON, {"cache-control": "no-cache"})
    add(PAGE, "text/html", _HEADERS)
    return router


def reference_page(document: Mapping[str, Any]) -> str:
    """Return the HTML of an OpenAPI document."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document.get("components", {}).get("schemas", {})
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style>",
            '<script type="module" src="page/docs.js"></script></head><body><main>',
            f'<p><a href="./">Talk with the model</a></p><h1>{title}</h1>',
            "<p>This server's HTTP API, from its <code>/openapi.json</code>. Examples read its "
            "address and API key, if it has keys, from two variables:</p>",
            "<pre>URL=http://127.0.0.1:8000 KEY=none</pre>",
            '<p><label>API key for the forms <input id="key" type="password" autocomplete="off">'
            "</label></p>",
            "<p>In the package, docs/serving.md explains the fields, and docs/realtime.md the "
            "WebSocket <code>/v1/realtime</code>.</p>",
            "<nav><ul>",
            *(
                f'<li><a href="#{_anchor(method, path)}"><code>{method} {escape(path)}</code></a>'
                for method, path, _ in operations
            ),
            '<li><a href="#objects">Objects in fields</a></ul></nav>',
            *(line for operation in operations for line in _section(*operation)),
            '<section id="objects"><h2>Objects in fields</h2>',
            *(line for name, schema in schemas.items() for line in _object(name, schema)),
            "</section></main></body></html>",
        )
    )


def _section(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f'<section id="{_anchor(method, path)}">'
    yield f"<h2><code>{method} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    yield f"<h3>Example</h3><pre>{escape(_curl(method, path, operation))}</pre>"
    yield from _form(method, path, operation)
    schema = _body(operation)[1].get("schema", {})
    in_path = {one["name"]: one["schema"] for one in operation.get("parameters", ())}
    fields = {**in_path, **schema.get("properties", {})}
    if fields:
        yield "<h3>Fields</h3>"
        yield from _fields(fields, {*in_path, *schema.get("required", ())})
    rows = (
        f"<tr><td>{escape(str(status))}<td>{escape(answer['description'])}"
        for status, answer in operation["responses"].items()
        if str(status) != "200"
    )
    yield from ("<h3>Errors</h3><table><tr><th>status<th>why", *rows, "</table></section>")


def _object(name: str, schema: _Schema) -> Iterator[str]:
    yield f'<h3 id="{escape(name)}"><code>{escape(_short(name))}</code></h3>'
    yield f"<p>{escape(schema.get('description', ''))}</p>"
    yield from _fields(schema.get("properties", {}), set(schema.get("required", ())))


def _fields(fields: Mapping[str, _Schema], required: set[str]) -> Iterator[str]:
    yield "<table><tr><th>field<th>type, limits and meaning"
    for name, schema in fields.items():
        must = ", required" if name in required else ""
        default = schema.get("default")
        ends = "" if default is None else f"; default: <code>{escape(json.dumps(default))}</code>"
        meaning = f"<br>{escape(schema['description'])}" if "description" in schema else ""
        yield f"<tr><td><code>{escape(name)}</code>{must}<td>{_type(schema)}{ends}{meaning}"
    yield "</table>"


def _type(schema: _Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{escape(name)}"><code>{escape(_short(name))}</code></a>'
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[union])))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kind = schema.get("type", "any value")
    kinds = escape(" or ".join([kind] if isinstance(kind, str) else kind))
    if kind == "array":
        kinds = f"list of {_type(schema.get('items', {}))}"
    elif schema.get("format") == "binary":
        kinds = "file"
    return ", ".join((kinds, *_limits(schema)))


def _limits(schema: _Schema) -> Iterator[str]:
    words = (
        *(("minimum", "at least {}"), ("exclusiveMinimum", "above {}"), ("maximum", "at most {}")),
        *(("minLength", "at least {} characters"), ("maxLength", "at most {} characters")),
        *(("minItems", "at least {} items"), ("maxItems", "at most {} items")),
        *(("maxProperties", "at most {} fields"), ("pattern", "of the form {}")),
    )
    for name, text in words:
        if name in schema:
            limit = schema[name]
            shown = f"{limit:g}" if isinstance(limit, float) else str(limit)
            yield escape(text.format(shown))


def _curl(method: str, path: str, operation: Mapping[str, Any]) -> str:
    placed = re.sub(r"\{(\w+)[^}]*\}", lambda found: found[1].upper(), path)
    how = "" if method == "GET" else f" -X {method}"
    parts = [f'curl -s{how} "$URL{placed}"', '-H "Authorization: Bearer $KEY"']
    form, body = _body(operation)
    example = body.get("example", {})
    if form == _FORM:
        fields = body["schema"]["properties"]
        for name, value in example.items():
            at = "@" if fields[name].get("format") == "binary" else ""
            parts.append(f"-F {shlex.quote(f'{name}={at}{value}')}")
    elif form:
        parts.append(f"-H 'Content-Type: {form}'")
        parts.append(f"-d {shlex.quote(json.dumps(example))}")
    if _JSON not in operation["responses"].get("200", {}).get("content", {}):
        parts.append("-o answer")
    return " \\\n    ".join(parts)


def _form(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    kind, body = _body(operation)
    example = body.get("example", {})
    yield f'<form data-method="{method}" data-path="{escape(path)}" data-type="{kind}">'
    fields = dict.fromkeys(re.findall(r"\{(\w+)", path), "")
    if kind == _FORM:
        fields |= example
    elif kind:
        text = json.dumps(example, indent=2)
        yield f'<textarea name="body" aria-label="Body" rows="{text.count(chr(10)) + 1}">'
        yield f"{escape(text)}</textarea>"
    for name, value in fields.items():
        schema = body.get("schema", {}).get("properties", {}).get(name, {})
        of_file = schema.get("format") == "binary"
        kept = 'type="file"' if of_file else f'value="{escape(value)}"'
        yield f'<label>{escape(name)} <input name="{escape(name)}" {kept} required></label>'
    yield "<button>Send</button><output></output></form>"


def _body(operation: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the media type of an endpoint's body, and its description; "" without one."""
    content = operation.get("requestBody", {}).get("content", {})
    return next(iter(content.items()), ("", {}))


def _anchor(method: str, path: str) -> str:
    return f"{method.lower()}{re.sub(r'[^a-z0-9]+', '-', path.lower())}".rstrip("-")


def _short(name: str) -> str:
    return name.partition("_")[2] or name
