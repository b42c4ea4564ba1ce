"""Clients of the server at once, beside the same requests through the API in this process.

    python -m bench.serve_load --clients 1,4,8,32 --json result.json
    python -m bench.serve_load --ray                           # and through Ray Serve, one replica
    python -m bench.serve_load --url https://api.openai.com/v1 --model gpt-audio     # that server

The server is a process of its own; each client asks, listens to the whole streamed reply, and asks
again over the same connection. A row is a number of clients in one of the ways: time to the first
words and sound, RTF, underruns of a client that plays, and requests a second. All ways ask the same
questions with the same seeds, in turn. --ray needs the extra `ray`.

--url is the base URL of any server of OpenAI's API, as its clients have it; the key is --key, or
OPENAI_API_KEY. It is the only way then, with fields alone that OpenAI documents: its replies are as
long as its model has them, so that --max-frames has no effect.

Real clients have machines of their own. Here they share the server's, so that they only read: every
byte, with the time at which it came. HTTP, JSON and sound are decoded when all have finished.
"""

import argparse
import base64
import io
import json
import socket
import ssl
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from http.client import HTTPResponse
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch

from bench.common.models import add_model_arguments, chosen_checkpoint, load_chosen
from qwen3_omni_neuron import Qwen3Omni
from testing.command_line import (
    Figures,
    InputError,
    Row,
    add_endpoint_arguments,
    parser_of,
    positive,
    run,
    sizes,
)
from testing.headlines import PLAYS, Headline, of_percentiles
from testing.http_client import JSON, READ_BYTES
from testing.metrics import (
    ChunkArrival,
    RequestEvents,
    TextArrival,
    percentiles,
    request_metrics,
)
from testing.observed import observe
from testing.raw_http import connected, head_of
from testing.server_process import QUEUED, SLOTS, server_process

QUESTION = [{"role": "user", "content": "What colour is the sky?"}]
LAST_CHUNK = b"0\r\n\r\n"  # end of a chunked HTTP body
REPLY_S = 600.0

Heard = Callable[[], RequestEvents]
"""A whole reply, which is decoded by this call."""
Client = Callable[[int], Heard]
"""Function that sends the request with a seed, and reads until the reply has ended."""
Way = Callable[[], AbstractContextManager[Client]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("serve_load", __doc__)
    add_model_arguments(parser)
    parser.add_argument("--clients", type=sizes, default=[1, 4, 8, 32], metavar="N,N,...")
    parser.add_argument("--requests", type=positive, default=8, help="of each client; default: 8")
    parser.add_argument("--rounds", type=positive, default=3, help="of both ways; default: 3")
    parser.add_argument("--max-frames", type=positive, default=48, help="of a reply; default: 48")
    parser.add_argument("--ray", action="store_true", help="a third way: one replica through Ray")
    add_endpoint_arguments(parser, "ask this server, and nothing else")
    return run("serve_load", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Ask in all ways, in turn, with each number of clients."""
    if options.url:
        if not options.model:
            raise InputError("--url needs --model, the name of the server's model.")
        asked = {"model": options.model, "audio": {"voice": "alloy", "format": "pcm16"}}
        rows = asked_in({"url": partial(over_http, options.url, asked, options.key)}, options)
        return rows, {}, headlines_of(rows, "url")
    with (
        chosen_checkpoint(options) as checkpoint,
        load_chosen(checkpoint, options, SLOTS, reuse=True) as omni,
        server_process(checkpoint, options) as (url, _),
        through_ray(checkpoint, options) if options.ray else nullcontext("") as ray_url,
    ):
        ways: dict[str, Way] = {
            "api": partial(through_api, omni, options),
            "http": partial(over_http, f"{url}/v1", limits(options)),
        }
        if options.ray:
            ways["ray"] = partial(over_http, f"{ray_url}/v1", limits(options))
        rows = asked_in(ways, options)
    return rows, {"overhead": overhead(rows)}, headlines_of(rows, "http")


def headlines_of(rows: Sequence[Row], way: str) -> list[Headline]:
    """Return the figures of one way with the fewest clients."""
    row = min((row for row in rows if row["way"] == way), key=lambda row: row["clients"])
    count, said = row["requests"], f"{row['clients']} at a time"
    return [
        of_percentiles("TTFT", row["ttft_s"], count, "s", said),
        of_percentiles("TTFB", row["ttfb_s"], count, "s", said),
        of_percentiles("RTF", row["rtf"], count, "", PLAYS),
    ]


def asked_in(ways: Mapping[str, Way], options: argparse.Namespace) -> list[Row]:
    """Ask in some ways, in turn, with each number of clients. Returns a row for each."""
    rows: list[Row] = []
    for way in ways.values():
        at_once(way, 1, 1)
    for clients in options.clients:
        found: dict[str, list[tuple[float, list[RequestEvents]]]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, way in ways.items():
                found[name].append(at_once(way, clients, options.requests))
        rows += [row_of(name, clients, rounds) for name, rounds in found.items()]
    return rows


@contextmanager
def through_api(omni: Qwen3Omni, options: argparse.Namespace) -> Iterator[Client]:
    """Make a client of a model in this process."""

    def ask(seed: int) -> Heard:
        events = observe(omni, QUESTION, {"seed": seed, **limits(options)}).events
        return lambda: events

    yield ask


@contextmanager
def over_http(url: str, more: dict[str, Any], key: str | None = None) -> Iterator[Client]:
    """Make a client of a server, with a connection of its own.

    url: base URL of its API; a certificate is checked. more: fields of each request.
    """
    parts = urlsplit(url)
    path = f"{parts.path.rstrip('/')}/chat/completions"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    with connected(url, REPLY_S, tls=tls) as sock:
        yield lambda seed: ask_over(sock, path, parts.netloc, headers, {"seed": seed, **more})


def limits(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "thinker_max_new_tokens": options.max_frames // 2,
        "talker_max_new_tokens": options.max_frames + 1,
    }


def at_once(way: Way, clients: int, requests: int) -> tuple[float, list[RequestEvents]]:
    """Run the clients, each with its requests in sequence. Returns the total seconds."""

    def run_client(number: int) -> list[Heard]:
        with way() as ask:
            return [ask(requests * number + i) for i in range(requests)]

    start_s = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        replies = [heard for found in pool.map(run_client, range(clients)) for heard in found]
    seconds = time.perf_counter() - start_s
    return seconds, [heard() for heard in replies]


def ask_over(
    sock: socket.socket, path: str, host: str, headers: dict[str, str], more: dict[str, Any]
) -> Heard:
    """Send one request over a connection, and read its reply with the times of its parts."""
    body = {
        "model": "load",
        "messages": QUESTION,
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "stream": True,
        **more,
    }
    # With several replicas, any of them takes it.
    headers = {**headers, **JSON, "x-session-id": str(more["seed"])}
    data = json.dumps(body).encode()
    arrived_s = time.perf_counter()
    sock.sendall(head_of(len(data), path, headers, host) + data)
    room = memoryview(bytearray(READ_BYTES))
    received: list[tuple[float, bytes]] = []
    last = b""
    while last != LAST_CHUNK:
        part = bytes(room[: sock.recv_into(room)])
        received.append((time.perf_counter(), part))
        last = (last + part[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
        if not part or not received[0][1].startswith(b"HTTP/1.1 200 "):
            raise InputError(f"the server answered: {received[0][1][:1000].decode()!r}.")
    return partial(decoded, arrived_s, received)


def decoded(arrived_s: float, received: Sequence[tuple[float, bytes]]) -> RequestEvents:
    """Return the events of a reply, each with the time when its last byte had been read."""
    ends = list(accumulate(len(part) for _, part in received))
    file = io.BufferedReader(io.BytesIO(b"".join(part for _, part in received)))
    answer = HTTPResponse(SimpleNamespace(makefile=lambda _: file))  # type: ignore[arg-type]
    answer.begin()
    texts, chunks, reason = [], [], ""
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        at_s = received[bisect_left(ends, file.tell())][0]
        choices = json.loads(line[6:]).get("choices")
        if not choices:  # the event of the usage
            continue
        choice = choices[0]
        audio = choice["delta"].get("audio") or {}
        reason = choice["finish_reason"] or reason
        if "transcript" in audio:
            texts.append(TextArrival(at_s, 1))
        if "data" in audio:
            samples = len(base64.b64decode(audio["data"])) // 2
            chunks.append(ChunkArrival(at_s, samples, 1))
    return RequestEvents(arrived_s, tuple(texts), tuple(chunks), received[-1][0], reason, reason)


def row_of(way: str, clients: int, rounds: list[tuple[float, list[RequestEvents]]]) -> Row:
    metrics = [request_metrics(events) for _, found in rounds for events in found]
    seconds = sum(seconds for seconds, _ in rounds)
    first = [m.ttfb_s for m in metrics if m.ttfb_s is not None]
    return {
        "way": way,
        "clients": clients,
        "requests": len(metrics),
        "ttft_s": percentiles([m.ttft_s for m in metrics if m.ttft_s is not None]),
        "ttfb_s": percentiles(first),
        "rtf": percentiles([m.rtf for m in metrics if m.rtf is not None]),
        "underruns": sum(m.underruns for m in metrics),
        "silent_s": sum(m.silent_s for m in metrics),
        "requests_per_s": len(metrics) / seconds,
        "audio_s_per_s": sum(m.audio_s for m in metrics) / seconds,
    }


def overhead(rows: Sequence[Row]) -> list[Row]:
    """Return the time that each way adds to the API's median first sound, and its throughput."""
    api = {row["clients"]: row for row in rows if row["way"] == "api"}
    return [
        {
            "way": row["way"],
            "clients": row["clients"],
            "added_ttfb_s": row["ttfb_s"]["p50"] - api[row["clients"]]["ttfb_s"]["p50"],
            "throughput_of_api": row["audio_s_per_s"] / api[row["clients"]]["audio_s_per_s"],
        }
        for row in rows
        if row["way"] != "api"
    ]


@contextmanager
def through_ray(checkpoint: Any, options: argparse.Namespace) -> Iterator[str]:
    """Serve the checkpoint with one replica in a Ray cluster on this machine. Yields the URL."""
    from testing.ray_cluster import cluster

    args: dict[str, Any] = {"model": str(checkpoint), "model_name": "load", "dtype": options.dtype}
    args |= {"placement": options.placement, "threads": options.threads or torch.get_num_threads()}
    with cluster() as started:
        started.plan("load", 1, max_concurrency=SLOTS, max_queued=QUEUED, **args)
        started.deploy()
        started.wait_for("load", 1)
        yield started.url


if __name__ == "__main__":
    sys.exit(main())
