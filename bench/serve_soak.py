"""Mixed load on the server for minutes, with clients that vanish: its memory, and what is left.

    python -m bench.serve_soak --minutes 10 --clients 12 --json result.json

Each client draws what it does next: listen to a whole reply, or to a streamed one, leave in the
middle of one, leave before its request is complete, or send what must be refused. --realtime: so
many more that talk over /v1/realtime: they ask spoken questions and hear the answers, speak while
one plays, or vanish in the middle of it. A row is a moment: memory of the server's process, and
what it has answered until then. At the end every slot must be free and no request in progress;
growth of memory counts from a quarter of the time on. Where the checkpoint that ships is asked
(--model), a sample of the spoken answers is judged by the ear then.
"""

import argparse
import base64
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from websockets.sync.client import connect

from bench.common.command_line import (
    Figures,
    InputError,
    Row,
    natural,
    parser_of,
    positive,
    run,
)
from bench.common.models import add_model_arguments, chosen_checkpoint
from bench.realtime import append, send
from bench.serve_load import REPLY_S, SLOTS, server_process
from train.judge import Judge

QUESTION = [{"role": "user", "content": "What colour is the sky?"}]
BAD: list[dict[str, Any]] = [
    {"messages": []},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/a"}}]}
        ]
    },
    {"audio": {"voice": "nobody"}},
    {"temperature": 9},
]
KINDS = ("whole", "streamed", "leaves", "leaves early", "refused")
TALKS = ("asks", "interrupts", "vanishes")
SPOKEN = Path(__file__).parents[1] / "examples" / "sum.wav"
RATE = 16000
ANSWER = "eight"  # of the checkpoint that ships
HEARD, HEARD_SHARE = 100, 0.2  # answers that are judged by the ear, of how many of all
SAMPLES = 40

Sound = NDArray[np.float32]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("serve_soak", __doc__)
    add_model_arguments(parser)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=positive, default=12)
    parser.add_argument("--max-frames", type=positive, default=48, help="of a reply; default: 48")
    parser.add_argument("--realtime", type=natural, default=0, help="clients that talk; default: 0")
    return run("serve_soak", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Send the load, and look at the process all along."""
    with (
        chosen_checkpoint(options) as checkpoint,
        server_process(checkpoint, options) as (host, port, process),
    ):
        seconds, start_s = 60 * options.minutes, time.perf_counter()
        end_s, counts, heard = start_s + seconds, Counter[str](), list[Sound]()
        clients = [
            threading.Thread(
                target=client, args=(host, port, number, end_s, options, counts, heard)
            )
            for number in range(options.clients + options.realtime)
        ]
        for one in clients:
            one.start()
        rows: list[Row] = []
        while time.perf_counter() < end_s:
            time.sleep(seconds / SAMPLES)
            at_s = time.perf_counter() - start_s
            rows.append({"at_s": at_s, "resident_mb": resident_mb(process), **counts})
        for one in clients:
            one.join()
        left = left_over(host, port)
    begun = rows[len(rows) // 4]["resident_mb"]
    grown = {"grown_mb": rows[-1]["resident_mb"] - begun, "resident_mb": rows[-1]["resident_mb"]}
    wrong = misheard(heard)
    return rows, {**grown, **counts, **left, "slots": SLOTS, "heard": len(heard), "wrong": wrong}


def misheard(answers: Sequence[Sound]) -> int:
    """Return how many of the answers say something else than ANSWER."""
    if not answers:
        return 0
    judge = Judge()
    return sum([found.word for found in judge.hear(one)] != [ANSWER] for one in answers)


def client(
    host: str,
    port: int,
    number: int,
    end_s: float,
    options: argparse.Namespace,
    counts: "Counter[str]",
    heard: list[Sound],
) -> None:
    """Do one thing after the other until the time is over. Each count is one client's own."""
    draw = random.Random(number)
    talks = number >= options.clients
    while time.perf_counter() < end_s:
        kind = draw.choice(TALKS if talks else KINDS)
        if talks:
            outcome = talk(f"ws://{host}:{port}/v1/realtime", kind, draw, heard)
        else:
            outcome = once(host, port, kind, draw, options.max_frames)
        counts[f"{kind}: {outcome}"] += 1


def once(host: str, port: int, kind: str, draw: random.Random, frames: int) -> str:
    """Send one request. Returns its status, or that the client left."""
    body: dict[str, Any] = {
        "model": "load",
        "messages": QUESTION,
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "stream": kind != "whole",
        "thinker_max_new_tokens": frames // 2,
        "talker_max_new_tokens": frames + 1,
    }
    if kind == "refused":
        body |= draw.choice(BAD)
    data = json.dumps(body).encode()
    if kind == "leaves early":
        with socket.create_connection((host, port)) as sock:
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            head += f"content-length: {len(data)}"
            sock.sendall(f"{head}\r\n\r\n".encode() + data[: draw.randrange(len(data) + 1)])
            time.sleep(draw.random() / 20)
        return "left"
    connection = http.client.HTTPConnection(host, port, timeout=300)
    try:
        connection.request("POST", "/v1/chat/completions", data)
        answer = connection.getresponse()
        if kind == "leaves":
            answer.read(draw.randrange(1, 20_000))
            return "left"
        answer.read()
        return str(answer.status)
    finally:
        connection.close()


def talk(url: str, kind: str, draw: random.Random, heard: list[Sound]) -> str:
    """Ask in speech, as fast as it can be sent. Returns what came of it.

    Of a question that nothing disturbed: the answer, where it is short and not ANSWER. heard: takes
    some of those that are.
    """
    samples, _ = soundfile.read(SPOKEN, dtype="float32")
    silence = np.zeros(RATE, np.float32)
    sound = {"format": {"type": "audio/pcm", "rate": RATE}}
    with connect(url, max_size=None) as socket:
        send(socket, "session.update", session={"type": "realtime", "audio": {"input": sound}})
        for number in range(draw.randrange(1, 4)):
            append(socket, np.concatenate((silence, samples, silence)))
            deltas: list[str] = []
            while True:
                event = json.loads(socket.recv(timeout=REPLY_S))
                if event["type"] == "error":
                    return f"error {event['error']['code']}"
                if event["type"] == "response.done":
                    break
                if event["type"] == "response.output_audio.delta":
                    deltas.append(event["delta"])
                if kind == "vanishes" and deltas and draw.random() < 0.5:
                    socket.close_socket()
                    return "left"
                if kind == "interrupts" and deltas and not number:
                    append(socket, np.concatenate((samples, silence)))
                    number = -1  # noqa: PLW2901
            response = event["response"]
            if kind != "asks":
                continue
            said = response["output"][0]["content"][0]["transcript"] if response["output"] else ""
            if response["status"] != "completed" or len(said) > 20:
                return str(response["status"])
            if said != ANSWER:
                return f"answered {said!r}"
            if len(heard) < HEARD and draw.random() < HEARD_SHARE:
                pcm = np.frombuffer(b"".join(map(base64.b64decode, deltas)), "<i2")
                heard.append(pcm.astype(np.float32) / np.float32(32768))
    return "done"


def left_over(host: str, port: int) -> dict[str, float]:
    """Return the figures that must be 0 once nobody asks any more, after at most ten seconds."""
    names = ("requests_in_progress", "slots_used", "queue_length")
    found: dict[str, float] = {}
    for _ in range(100):
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        found = {name: float(values[f"qwen3_omni_{name}"]) for name in names}
        if not any(found.values()):
            break
        time.sleep(0.1)
    return found


def resident_mb(process: "subprocess.Popen[str]") -> float:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    except OSError as error:
        raise InputError(f"the server's memory can't be read: {error}.") from error
    return next(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmRSS")) / 1024


if __name__ == "__main__":
    sys.exit(main())
