"""The OpenAPI document and the page at /docs: it has all of the former, whose texts stay texts."""

import asyncio
import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from starlette.testclient import TestClient

from qwen3_omni_neuron.serving import app as serving_app
from qwen3_omni_neuron.serving.app import make_app
from qwen3_omni_neuron.serving.reference import reference_page
from qwen3_omni_neuron.serving.service import Service
from qwen3_omni_neuron.serving.settings import ServerSettings

LIMITS = ("minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems")
LIMITS += ("maxItems", "maxProperties", "pattern", "const")
HOSTILE = "<script>'\"&</script>"


class Elements(HTMLParser):
    """Tags of a page with their attributes, and the text of its elements `code`."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.codes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "code":
            self.codes.append("")

    def handle_data(self, data: str) -> None:
        if self.codes and self.lasttag == "code":
            self.codes[-1] += data


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    service = Service(ServerSettings(api_keys=("key",)))
    try:
        yield make_app(service)
    finally:
        service.model.close()


@pytest.fixture(scope="module")
def document(app) -> Mapping[str, Any]:
    found: Mapping[str, Any] = app._app.openapi()
    return found


def limits_of(schema: Any) -> Iterator[str]:
    """Texts of all limits and values in a schema, also in its unions and lists."""
    if isinstance(schema, list):
        for inner in schema:
            yield from limits_of(inner)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name == "enum":
                yield from map(json.dumps, value)
            elif name == "const":
                yield json.dumps(value)
            elif name in LIMITS:
                yield f" {value:g}" if isinstance(value, float) else f" {value}"
            elif name in ("anyOf", "oneOf", "items"):
                yield from limits_of(value)


def test_every_path_and_field_is_on_the_page_with_its_limits(document) -> None:
    page = reference_page(document)
    sections = re.split(r'<section id="|<h3 id="', page)[1:]
    fields_of: list[tuple[str, Mapping[str, Any]]] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            (section,) = [s for s in sections if f"<h2><code>{method.upper()} {path}</code>" in s]
            assert f'href="#{section.partition(chr(34))[0]}"' in page
            assert operation["description"].splitlines()[0] in unescape(section)
            content = operation.get("requestBody", {}).get("content", {})
            for body in content.values():
                fields_of.append((section, body["schema"]["properties"]))
            fields_of.append((section, {p["name"]: p for p in operation.get("parameters", ())}))
    assert len(fields_of) > 20
    for name, schema in document["components"]["schemas"].items():
        (section,) = [s for s in sections if s.startswith(f'{name}"')]
        fields_of.append((section, schema["properties"]))
    for section, fields in fields_of:
        for name, field in fields.items():
            (row,) = re.findall(rf"<tr><td><code>{re.escape(name)}</code>.*", section)
            for text in (field.get("description", ""), *limits_of(field)):
                assert text in unescape(row), (name, text)


def test_links_of_the_page_lead_to_places_on_it(document) -> None:
    tags = Elements(reference_page(document)).tags
    places = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(places) == len(set(places))
    links = {attributes["href"] for tag, attributes in tags if tag == "a"}
    assert links <= {"./", *(f"#{place}" for place in places)}
    assert len(links) > 60


def test_texts_of_the_document_are_texts_on_the_page() -> None:
    schema = {
        "properties": {
            HOSTILE: {"description": HOSTILE, "default": HOSTILE, "pattern": HOSTILE},
            "a": {"const": HOSTILE},
            "b": {"enum": [HOSTILE]},
            "c": {"$ref": f"#/components/schemas/{HOSTILE}"},
            "d": {"type": HOSTILE},
        }
    }
    body = {"application/json": {"schema": schema, "example": {HOSTILE: HOSTILE}}}
    operation = {
        "description": HOSTILE,
        "requestBody": {"content": body},
        "responses": {HOSTILE: {"description": HOSTILE}},
    }
    page = reference_page(
        {
            "info": {"title": HOSTILE, "version": HOSTILE},
            "paths": {f"/{HOSTILE}": {"post": operation}},
            "components": {"schemas": {HOSTILE: {"description": HOSTILE, **schema}}},
        }
    )
    found = Elements(page)
    assert {name for _, attributes in found.tags for name in attributes} <= {
        *("lang", "charset", "name", "content", "id", "href", "type", "src", "autocomplete"),
        *("data-method", "data-path", "data-type", "aria-label", "rows", "value", "required"),
    }
    assert found.codes.count(HOSTILE) >= 2
    assert page.count("<script") == 1


def test_whoever_asks_first_at_the_same_time_gets_the_whole_document_once_made(
    app, document, monkeypatch
) -> None:
    """In a thread: the event loop goes on. The first two ask while the document is made."""
    made: list[int] = []
    begun, asked = threading.Event(), threading.Event()
    get = serving_app.get_openapi

    def slow(**given: Any) -> dict[str, Any]:
        made.append(threading.get_ident())
        begun.set()
        assert asked.wait(10), "the event loop waits for the document"
        return get(**given)

    monkeypatch.setattr(serving_app, "get_openapi", slow)
    fresh = make_app(app._service)

    async def ask(path: str) -> tuple[int, bytes]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        host = [(b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "GET", "path": path, "headers": host}
        scope |= {"query_string": b"", "client": ("127.0.0.1", 1)}
        await fresh(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        return sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:])

    async def both() -> list[tuple[int, bytes]]:
        asking = [asyncio.create_task(ask(path)) for path in ("/docs", "/openapi.json")]
        while not begun.is_set():
            await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_later(0.01, asked.set)
        return await asyncio.gather(*asking)

    (of_page, page), (of_document, text) = asyncio.run(both())
    assert (of_page, of_document, len(made)) == (200, 200, 1)
    assert json.loads(text) == document
    assert page.decode() == reference_page(document)
    assert made[0] != threading.get_ident()


def test_both_are_served_without_a_key_and_the_page_asks_for_nothing_elsewhere(
    app, document
) -> None:
    client = TestClient(app, base_url="http://127.0.0.1")
    answer = client.get("/docs")
    told = client.get("/openapi.json")
    assert (told.status_code, told.json()) == (200, document)
    assert told.headers["content-type"] == "application/json"
    assert client.get("/v1/models").status_code == 401
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    tags = Elements(answer.text).tags
    assert not {"link", "img", "iframe"} & {tag for tag, _ in tags}
    assert [made.get("src") for tag, made in tags if tag == "script"] == ["page/docs.js"]
    assert len(answer.content) < 100_000
