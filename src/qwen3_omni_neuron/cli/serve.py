"""`qwen3-omni-neuron serve`: answers over HTTP, in the shapes of OpenAI's API."""

import argparse
import os
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.cli.model_arguments import (
    add_model_arguments,
    load_arguments,
    model_or_shipped,
)
from qwen3_omni_neuron.errors import NotInstalledError

KEYS_VARIABLE = "QWEN3_OMNI_API_KEYS"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Flags of the same name as a field of ServerSettings, with a number as their value.
_LIMITS = {
    "--requests-per-minute": "of one key, or of one address without keys; default: any number",
    "--max-connections": "open at a time",
    "--header-timeout-s": "time for a request's headers",
    "--body-timeout-s": "time for a request's body",
    "--send-timeout-s": "time for a client that has stopped reading to go on",
    "--request-timeout-s": "time for a whole request",
    "--drain-timeout-s": "time for running requests to end after SIGTERM",
    "--stall-timeout-s": "time for one call of an engine; after it /health and /ready say 503",
    "--max-body-bytes": "of one request",
    "--max-request-bytes": "of one request in memory, with its media decoded",
    "--max-held-bytes": "of all requests and sessions in memory",
    "--owner-share": "part of all bytes, requests and sessions that one key or address may have",
    "--max-media": "media items of a request",
    "--max-media-bytes": "of one item",
    "--max-media-s": "duration of one item",
    "--max-pixels": "of an image or a frame",
    "--decoders": "processes that decode media at a time",
    "--decoder-bytes": "memory of one of them",
    "--decode-timeout-s": "time to decode one item",
    "--media-timeout-s": "time to fetch a URL",
    "--max-realtime-sessions": "that are open at a time",
    "--max-realtime-s": "duration of a realtime session",
    "--max-realtime-bytes": "of a realtime session's items and sound",
    "--kept-replies": "spoken replies that a later turn may name by the id of their audio",
    "--kept-reply-s": "time that they are kept",
}


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.set_defaults(run=partial(_serve, parser))
    parser.add_argument(
        "--ray",
        type=Path,
        metavar="CONFIG",
        help="serve with Ray what a Serve YAML says, see docs/fleet.md; takes no other argument",
    )
    add_model_arguments(parser, "the small one that ships with the package")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument(
        "--model-name", metavar="NAME", help="name that requests ask for; default: the folder's"
    )
    parser.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests at a time; default: 8"
    )
    parser.add_argument(
        "--max-queued", type=int, default=64, metavar="N", help="that wait; default: %(default)s"
    )
    parser.add_argument(
        "--context-length", type=int, metavar="N", help="positions of a request; default: 8192"
    )
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help=f"file of API keys, one a line; default: those in ${KEYS_VARIABLE}, with commas "
        "between them, or else none are needed",
    )
    parser.add_argument("--tls-cert", type=Path, metavar="PEM", help="certificate, for HTTPS")
    parser.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key")
    parser.add_argument(
        "--allow-media-host",
        action="append",
        default=[],
        metavar="HOST",
        help="host whose URLs may be fetched for media; repeatable; default: none",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="page of another host that may use the server, such as https://example.org; "
        "repeatable; default: none",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name under which a server without keys may be asked, beside localhost, its addresses "
        "and --host; repeatable; default: none",
    )
    parser.add_argument("--log-level", default="info", help="default: %(default)s")
    parser.add_argument(
        "--log-content", action="store_true", help="write texts of requests and replies to the log"
    )
    for flag, text in _LIMITS.items():
        parser.add_argument(flag, type=_number, metavar="N", help=text)


def _serve(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns the exit status."""
    others = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(parsed).items()
        if name != "ray" and value != parser.get_default(name)
    ]
    if parsed.ray is not None and others:
        parser.error(f"{parsed.ray} has everything, leave out {', '.join(others)}")
    extra = "serve" if parsed.ray is None else "ray"
    try:
        import fastapi  # noqa: F401
        import httptools  # noqa: F401
        import prometheus_client  # noqa: F401
        import pybase64  # noqa: F401
        import uvicorn  # noqa: F401
        import websockets  # noqa: F401

        if parsed.ray is not None:
            import ray.serve  # noqa: F401
    except ImportError as error:
        raise NotInstalledError(
            f"the server needs {error.name}, which is not installed. Run: "
            f"pip install 'qwen3-omni-neuron[{extra}]'."
        ) from error
    if parsed.ray is not None:
        from qwen3_omni_neuron.serving.fleet.command import run_config

        run_config(parsed.ray)
    from qwen3_omni_neuron.serving import logs
    from qwen3_omni_neuron.serving.model import load_and_answer
    from qwen3_omni_neuron.serving.server import Server
    from qwen3_omni_neuron.serving.settings import ServerSettings, name_of_model

    model = model_or_shipped(parsed)
    given: dict[str, Any] = {
        field.name: value
        for field in fields(ServerSettings)
        if (value := getattr(parsed, field.name, None)) is not None and field.name != "api_keys"
    }
    settings = ServerSettings(
        **{
            "model_name": name_of_model(model),
            **given,
            "api_keys": _keys(parsed.api_keys),
            "media_hosts": tuple(parsed.allow_media_host),
            "allowed_hosts": tuple(parsed.allow_host),
            "allowed_origins": tuple(url.lower().rstrip("/") for url in parsed.allow_origin),
        }
    )
    logs.log_to_stderr(parsed.log_level)
    if settings.host not in LOOPBACK and not settings.api_keys:
        print(
            f"qwen3-omni-neuron: {settings.host} may be reached by others, and no API key is "
            "needed. Give --api-keys FILE.",
            file=sys.stderr,
        )
    load = load_arguments(parsed, slots=8) | {
        "max_queued": parsed.max_queued,
        "context_length": parsed.context_length,
    }
    if parsed.max_concurrency is not None:
        load["max_concurrency"] = parsed.max_concurrency
    return Server(settings, partial(load_and_answer, model, **load)).run()


def _keys(file: Path | None) -> tuple[str, ...]:
    from qwen3_omni_neuron.serving.keys import read_keys

    if file is not None:
        return read_keys(file)
    return tuple(k for key in os.environ.get(KEYS_VARIABLE, "").split(",") if (k := key.strip()))


def _number(text: str) -> int | float:
    """Parse a whole number, or one with a point."""
    return int(text) if text.isdecimal() else float(text)
