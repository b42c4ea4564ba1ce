"""Work that one owner asks for and does not wait for, while another owner's chats go on.

Beside hand-made kinds there is one for each endpoint of the OpenAPI document, and another one with
lists for those with a body: the example of the document, as large as the server accepts it.
"""

import base64
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

from qwen3_omni_neuron.serving.app import make_app
from qwen3_omni_neuron.serving.service import Service
from qwen3_omni_neuron.serving.settings import ServerSettings
from test.hostile.attacks import files
from test.hostile.attacks.good_client import MODEL
from test.hostile.attacks.kinds import Kind
from test.hostile.attacks.outcomes import ANSWERED, LEFT, REFUSED, WAIT_S, Outcome, check
from test.hostile.attacks.over_http import at_once, head_of, raw, user
from test.hostile.attacks.over_socket import session
from test.hostile.attacks.target import Target
from test.hostile.attacks.texts import CHAT, text_item
from testing.http_client import HttpClient, form
from testing.raw_http import connected
from testing.websocket_client import send

LINKS, LEFT_S = 8, 0.05  # connections of one client, and the time after which each leaves
RESPONSES = "/v1/responses"
WORDS, MESSAGES = "seven red three ", 8000
TIMES = (8192, 2048, 512, 64, 8)
ONE_TOKEN = ("max_output_tokens", "max_tokens")
Json = dict[str, Any]
Request = tuple[str, str, Mapping[str, str], bytes]
"""Method, path, headers and body."""


def asked(path: str, body: Json, method: str = "POST") -> Request:
    """Return a request with a JSON body."""
    return method, path, {"content-type": "application/json"}, json.dumps(body).encode()


def bytes_of(target: Target, request: Request) -> bytes:
    """Return a request as it is sent."""
    method, path, headers, body = request
    return head_of(target, path, len(body), headers).replace(b"POST", method.encode(), 1) + body


def leaving(target: Target, request: Request, links: int = LINKS) -> list[Outcome]:
    """Send a request over several connections, and leave them, for some seconds."""
    data, end_s = bytes_of(target, request), time.monotonic() + (1.5 if target.short else 5)

    def work() -> Outcome:
        while time.monotonic() < end_s:
            with suppress(OSError), connected(target.front, WAIT_S) as sock:
                sock.sendall(data)
                time.sleep(LEFT_S)
        return Outcome(LEFT)

    return at_once([work] * links)


def kept(target: Target, item: Any, count: int = 1) -> str:
    """Keep a response of so many equal input items. Returns its id."""
    body = {"input": [item] * count, "truncation": "auto", "max_output_tokens": 1}
    with HttpClient(target.url, target.key) as client:
        return str(client.ask(RESPONSES, body).json()["id"])


def pages(target: Target) -> list[Outcome]:
    """Ask for pages of one item of a response with 18 MiB of text."""
    path = f"{RESPONSES}/{kept(target, user(150 * WORDS), MESSAGES)}/input_items?limit=1"
    return leaving(target, ("GET", path, {}, b""))


def kept_image(target: Target) -> list[Outcome]:
    """Continue a response with a large image, by its name."""
    rows = b"".join(b"\0" + os.urandom(3 * 1024) for _ in range(1024))
    image = base64.b64encode(files.png(1024, 1024, pixels=zlib.compress(rows, 0))).decode()
    item = user({"type": "input_image", "image_url": f"data:image/png;base64,{image}"})
    body = {"previous_response_id": kept(target, item), "input": "?", "max_output_tokens": 1}
    return leaving(target, asked(RESPONSES, body))


def messages(target: Target) -> list[Outcome]:
    """Send conversations of 8,000 short messages, no two alike, which truncation cuts."""
    said = [user(f"{WORDS}{i}") for i in range(MESSAGES)]
    body = {"model": MODEL, "max_tokens": 1, "truncation": "auto", "messages": said}
    return leaving(target, asked(CHAT, body), links=6)


def turns(target: Target) -> list[Outcome]:
    """Ask for responses in realtime sessions of long conversations, and cancel them."""
    end_s = time.monotonic() + (1.5 if target.short else 5)

    def work() -> Outcome:
        with session(target, output_modalities=["text"]) as made:
            kind, fields = text_item("seven " * 1000)
            for _ in range(30):
                send(made, kind, **fields)
            while time.monotonic() < end_s:
                send(made, "response.create")
                time.sleep(LEFT_S)
                send(made, "response.cancel")
        return Outcome(LEFT)

    return at_once([work] * 4)


# Of the document


@cache
def document() -> Json:
    """Return the server's OpenAPI document."""
    return make_app(Service(ServerSettings(MODEL)))._app.openapi()  # type: ignore[attr-defined]


def enlarged(value: Any, times: int, by_list: bool) -> Any:
    """Return a value with its texts, or else its lists, so many times as long."""
    if isinstance(value, str):
        return [user(value)] * times if by_list else f"{value} " * times
    if isinstance(value, list):
        return value * times if by_list else [enlarged(one, times, False) for one in value]
    if isinstance(value, dict) and not by_list:
        return {k: enlarged(v, times, False) if k == "content" else v for k, v in value.items()}
    return value


def candidates(path: str, operation: Json, by_list: bool) -> Iterator[Request]:
    """Yield bodies of an endpoint, the largest one first."""
    (kind, content), *_ = operation["requestBody"]["content"].items()
    if kind == "multipart/form-data":
        body, headers = form({"model": MODEL.encode()}, files.sound("FLAC", seconds=600))
        yield "POST", path, headers, body
        return
    fields, example = content["schema"]["properties"], content["example"]
    main = next(iter(example))
    more: Json = dict.fromkeys([name for name in ONE_TOKEN if name in fields][:1], 1)
    if "truncation" in fields:
        more["truncation"] = "auto"
    for times in TIMES:
        large = enlarged(example[main], times, by_list)
        yield asked(path, {**example, **more, main: large})
    yield asked(path, example)


def dearest(target: Target, method: str, path: str, by_list: bool) -> list[Outcome]:
    """Send the largest request of an endpoint that is accepted, and leave, again and again."""
    operation = document()["paths"][path][method]
    if "{" in path:
        named = kept(target, user(WORDS), MESSAGES) if path.startswith(RESPONSES) else MODEL
        path = path.partition("{")[0] + named + path.partition("}")[2]
    found: Request = (method.upper(), path, {}, b"")
    if "requestBody" in operation:
        for found in candidates(path, operation, by_list):
            first = raw(target, bytes_of(target, found), wait_s=2, leave=True)
            if first.how != REFUSED:
                break
        else:
            return [check(False, f"no body for {path} is accepted")]
    return leaving(target, found)


def of_document() -> Iterator[Kind]:
    """Yield the kinds of the document."""
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            forms = (False, True) if "application/json" in content else (False,)
            for by_list in forms:
                name = f"owner-{method}-{path.strip('/').replace('/', '-')}{'-list' * by_list}"
                attack = partial(dearest, method=method, path=path, by_list=by_list)
                sends = f"{method.upper()} {path}, left after {LEFT_S:g} s"
                yield Kind(name, sends, attack, frozenset((ANSWERED,)), fair=True)


def _kind(name: str, sends: str, attack: Callable[[Target], list[Outcome]]) -> Kind:
    return Kind(name, sends, attack, frozenset((ANSWERED,)), fair=True)


KINDS = (
    _kind("owner-pages", "pages of one item of a response with 18 MiB", pages),
    _kind("owner-kept-image", "80 bytes that name a kept image", kept_image),
    _kind("owner-messages", "8,000 messages that truncation cuts", messages),
    _kind("owner-turns", "realtime responses of long conversations", turns),
    *of_document(),
)
