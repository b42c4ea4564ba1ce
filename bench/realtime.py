"""End of speech to the first sample of the answer over /v1/realtime, beside the same in process.

    python -m bench.realtime --sessions 1,4,8 --json realtime.json

Each session speaks a question in pieces, each sent when its last sample was spoken; the clock
starts when the last one of speech is sent. Three ways, in turn: "api", `Qwen3Omni.session` in this
process; "commit", over the socket with input_audio_buffer.commit and response.create right behind
the last piece; "vad", with server_vad, for which silence goes on. A row is a way and a number of
sessions at once; added_s is what the socket adds to the median. The method is that of vllm-omni's
own figures (419 ms with a commit, 1035 ms with server VAD, on other hardware).
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from websockets.sync.client import ClientConnection

from bench.common.command_line import Figures, InputError, Row, parser_of, positive, run, sizes
from bench.common.metrics import percentiles
from bench.common.models import add_model_arguments, chosen_checkpoint, load_chosen
from bench.end_of_speech import LIMITS, RATE
from bench.serve_load import SLOTS, server_process
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.events import AudioChunk
from qwen3_omni_neuron.options import RequestArguments
from testing.websocket_client import append, opened, received, send

SPOKEN = Path(__file__).parents[1] / "examples" / "sum.wav"
WAIT_S = 60.0
MOST_SILENCE_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("realtime", __doc__)
    add_model_arguments(parser)
    parser.add_argument("--sessions", type=sizes, default=[1, 4, 8], metavar="N,N,...")
    parser.add_argument("--turns", type=positive, default=5, help="of each session; default: 5")
    parser.add_argument("--piece-ms", type=positive, default=100)
    parser.add_argument(
        "--question", default=str(SPOKEN), help="a sound file; default: the example"
    )
    return run("realtime", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure each way at each number of sessions."""
    samples, rate = soundfile.read(options.question, dtype="float32")
    if rate != RATE or samples.ndim != 1:
        raise InputError(f"{options.question} is not mono of {RATE} Hz.")
    rows: list[Row] = []
    with (
        chosen_checkpoint(options) as checkpoint,
        load_chosen(checkpoint, options, SLOTS, reuse=True) as omni,
        server_process(checkpoint, options) as (url, _),
    ):
        ways: dict[str, Callable[[int], list[float]]] = {
            "api": lambda number: in_process(omni, samples, number, options),
            "commit": lambda number: over_socket(url, samples, number, options, vad=False),
            "vad": lambda number: over_socket(url, samples, number, options, vad=True),
        }
        for sessions in options.sessions:
            for way, talk in ways.items():
                with ThreadPoolExecutor(sessions) as pool:
                    found = [s for part in pool.map(talk, range(sessions)) for s in part]
                quantiles = percentiles(found)
                rows.append({"way": way, "sessions": sessions, "turns": len(found)})
                rows[-1] |= {"first_sample_s": quantiles}
    medians = {(row["way"], row["sessions"]): row["first_sample_s"]["p50"] for row in rows}
    added = {str(n): medians["commit", n] - medians["api", n] for n in options.sessions}
    return rows, {"added_s": added}


def pieces(samples: Any, piece_ms: int) -> Any:
    """Yield a question's pieces, each at the time when its last sample has been spoken."""
    size, start_s = RATE * piece_ms // 1000, time.perf_counter()
    for first in range(0, len(samples), size):
        piece = samples[first : first + size]
        due_s = start_s + (first + len(piece)) / RATE
        time.sleep(max(0.0, due_s - time.perf_counter()))
        yield piece


def in_process(
    omni: Qwen3Omni, samples: Any, number: int, options: argparse.Namespace
) -> list[float]:
    """Speak the turns of one session in this process; the first one is not counted."""
    found = []
    asked: RequestArguments = {**LIMITS, "seed": number, "literal_text": True}
    with omni.session(**asked) as session:
        for turn in range(options.turns + 1):
            ended_s = first_s = 0.0
            for piece in pieces(np.roll(samples, 997 * (turn + 10 * number)), options.piece_ms):
                ended_s = time.perf_counter()
                session.append_audio(piece, RATE)
            for event in session.respond():
                if isinstance(event, AudioChunk) and not first_s:
                    first_s = time.perf_counter()
            found.append(first_s - ended_s)
    return found[1:]


def over_socket(
    url: str, samples: Any, number: int, options: argparse.Namespace, vad: bool
) -> list[float]:
    """Speak the turns of one session over a socket; the first one is not counted."""
    found = []
    detection = {"type": "server_vad"} if vad else None
    sound = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": detection}
    with opened(url) as socket:
        session = {"type": "realtime", "audio": {"input": sound}, "seed": number, **LIMITS}
        send(socket, "session.update", session=session)
        for turn in range(options.turns + 1):
            # A rolled question would begin and end in mid-word, which is no turn for a VAD.
            said = samples if vad else np.roll(samples, 997 * (turn + 10 * number))
            found.append(spoken_turn(socket, said, options.piece_ms, vad))
    return found[1:]


def spoken_turn(socket: ClientConnection, samples: Any, piece_ms: int, vad: bool) -> float:
    """Speak one turn. Returns seconds from its last sample to the answer's first."""
    first_s, done = list[float](), threading.Event()

    def listen() -> None:
        while True:
            event = received(socket, WAIT_S)
            if event["type"] == "error":
                raise InputError(event["error"]["message"])
            if event["type"] == "response.created":
                first_s.clear()
            elif event["type"] == "response.output_audio.delta":
                first_s.append(time.perf_counter())
            elif event["type"] == "response.done" and event["response"]["status"] != "cancelled":
                return done.set()

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen)
        ended_s = 0.0
        for piece in pieces(samples, piece_ms):
            ended_s = time.perf_counter()
            append(socket, piece)
        if vad:
            silence = np.zeros(int(MOST_SILENCE_S * RATE), np.float32)
            for piece in pieces(silence, piece_ms):
                if done.is_set():
                    break
                append(socket, piece)
        else:
            send(socket, "input_audio_buffer.commit")
            send(socket, "response.create")
        listening.result()
    return first_s[0] - ended_s


if __name__ == "__main__":
    sys.exit(main())
