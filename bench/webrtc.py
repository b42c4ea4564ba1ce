"""Speech through WebRTC and through /v1/realtime over a network that loses packets, side by side.

    pip install aiortc
    sudo python -m bench.webrtc --loss 0,1,3 --jitter-ms 30 --seconds 60 --json webrtc.json
    sudo chrt -r 1 python -m bench.webrtc                       # on a machine with other work

A caller and a server, each a process in a network of its own, talk over a relay in a third process
(see bench.common.lossy_network; it needs Linux and root). Once they are connected a packet of IP is
lost with the probability of --loss, in percent, and waits for a time drawn from 0 to --jitter-ms,
in either direction; packets keep their order. A row is one way of the sound, with loss and jitter:

- "webrtc, to the server": the caller's microphone through aiortc: Opus in packets of 20 ms, and
  what the server's end hands out;
- "websocket, to the server": the same over our WebSocket, in events of 20 ms, to the session;
- "websocket, to the caller": an answer that is made at the speed of speech, the least that a server
  may do, in events of 80 ms, through a player that begins with 40 ms of sound, as our page does, or
  with 200, and waits where it has none.

Both ways of the WebSocket are one call. The figures are of frames of 20 ms:

- frames: that were handed out; missing_ms: sound that never was;
- stall_ms: what the wait for a frame exceeds 20 ms, its 95th percentile and maximum; stalls: those
  of more than 60 ms, a minute;
- behind_ms: how much later than at best frames are handed out, with the player's buffer: median,
  and that of the last second.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.call import CALL_RATE, Call
from bench.common.command_line import Figures, InputError, Row, parser_of, positive, run
from bench.common.lossy_network import ADDRESSES, check, run_sides
from bench.common.metrics import SAME_MOMENT_S, ChunkArrival, playing
from bench.common.models import made_checkpoint
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk, Event
from qwen3_omni_neuron.prompt.turns import Reply
from testing.http_server import serving
from testing.scripted_model import ScriptedStream
from testing.websocket_client import opened, send

RATE, FRAME_S, STALL_MS = 48_000, 0.02, 60.0
BUFFERS_S = (0.04, 0.2)  # our page's; as much as aiortc is behind after a lost packet
CONNECT_S, LIMIT_S = 20.0, 60.0  # for the peers to be connected; beside the sound, for everything
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")

Arrivals = list[tuple[float, float]]
"""Of each frame when it was handed out and when its sound began, seconds by any two clocks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("webrtc", __doc__)
    parser.add_argument("--loss", type=percents, default="0,1,3", help="percent of packets lost")
    parser.add_argument("--jitter-ms", type=percents, default="30")
    parser.add_argument("--seconds", type=positive, default=60, help="of sound, each")
    return run("webrtc", parser, measure, arguments)


def percents(text: str) -> list[float]:
    """Parse numbers of 0 and more, separated by commas."""
    values = [float(part) for part in text.split(",")]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"numbers of 0 and more, got {text}")
    return values


def measure(options: argparse.Namespace) -> Figures:
    """Send sound over each network: a row for each way."""
    try:
        import aiortc  # noqa: F401, imported here for the error
    except ImportError:
        raise InputError("aiortc is not installed: pip install aiortc") from None
    check()
    rows = []
    for jitter_ms in options.jitter_ms:
        for loss in options.loss:
            network = (loss / 100, jitter_ms / 1000, options.seconds, options.seconds + LIMIT_S)
            heard, _ = run_sides((webrtc_server, webrtc_caller), *network)
            ways = {"webrtc, to the server": figures(heard)}
            heard, chunks = run_sides((websocket_server, websocket_caller), *network)
            ways["websocket, to the server"] = figures(heard)
            for buffer_s in BUFFERS_S:
                way = f"websocket, to the caller, {buffer_s * 1000:.0f} ms"
                ways[way] = figures(played(chunks, buffer_s), buffer_s)
            for way, found in ways.items():
                rows.append({"way": way, "loss_percent": loss, "jitter_ms": jitter_ms, **found})
    return rows, {"congestion_control": CONGESTION.read_text(encoding="ascii").strip()}


def figures(arrivals: Arrivals, buffer_s: float = 0.0) -> Row:
    """Return the figures of frames. buffer_s: which the first one has waited for already."""
    if len(arrivals) < 2:
        raise InputError(f"{len(arrivals)} frames were received: nothing can be measured.")
    out_s, spoken_s = np.array(arrivals).T
    stall_ms = np.maximum(0, np.diff(out_s) - FRAME_S) * 1e3
    behind_ms = (out_s - spoken_s - (out_s - spoken_s).min() + buffer_s) * 1e3
    minutes = (out_s[-1] - out_s[0]) / 60
    return {
        "frames": len(arrivals),
        "missing_ms": round(float((np.diff(spoken_s) - FRAME_S).sum() * 1e3)),
        "stall_ms_p95": round(float(np.percentile(stall_ms, 95)), 1),
        "stall_ms_max": round(float(stall_ms.max()), 1),
        "stalls": round(float((stall_ms > STALL_MS).sum() / minutes), 1),
        "behind_ms": round(float(np.median(behind_ms)), 1),
        "behind_ms_end": round(float(np.median(behind_ms[-round(1 / FRAME_S) :])), 1),
    }


def played(chunks: Sequence[ChunkArrival], buffer_s: float) -> Arrivals:
    """Return the frames of chunks as a player that begins after buffer_s hands them out."""
    late = [ChunkArrival(chunks[0].at_s + buffer_s, 0, 0), *chunks]
    found: Arrivals = []
    for (start_s, end_s), chunk in zip(playing(late, CALL_RATE), late, strict=True):
        frames = round(chunk.samples / CALL_RATE / FRAME_S)
        times = np.linspace(start_s, end_s, frames, endpoint=False)
        found += [(float(out_s), FRAME_S * (len(found) + n)) for n, out_s in enumerate(times)]
    return found


def framed(pieces: Arrivals) -> Arrivals:
    """Return the frames of pieces of any length: each is there with its last sample.

    pieces: of each when it came, and its seconds.
    """
    at_s, lengths_s = np.array(pieces).T
    ends_s = np.cumsum(lengths_s)
    frames = np.arange(int(ends_s[-1] / FRAME_S))
    last = np.searchsorted(ends_s, (frames + 1) * FRAME_S - SAME_MOMENT_S)
    return [(float(at_s[piece]), float(n * FRAME_S)) for n, piece in zip(frames, last, strict=True)]


# What each process does: see bench.common.lossy_network.Side. The server is the first.


def webrtc_server(other: Connection, bad: Any, seconds: float) -> Arrivals:
    """Receive a caller's sound."""
    from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
    from aiortc.mediastreams import MediaStreamError

    arrivals: Arrivals = []
    reading: list[asyncio.Task[None]] = []

    async def read(track: Any) -> None:
        try:
            while True:
                frame = await track.recv()
                if bad.is_set():
                    arrivals.append((time.monotonic(), float(frame.pts * frame.time_base)))
        except MediaStreamError:
            return  # the call is over

    async def serve() -> None:
        peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        peer.on("track", lambda track: reading.append(asyncio.ensure_future(read(track))))
        offer = await asyncio.to_thread(other.recv)
        await peer.setRemoteDescription(RTCSessionDescription(offer, "offer"))
        await peer.setLocalDescription(await peer.createAnswer())
        other.send(peer.localDescription.sdp)
        await asyncio.to_thread(other.recv)
        await peer.close()
        await asyncio.gather(*reading)

    asyncio.run(serve())
    return arrivals


def webrtc_caller(other: Connection, bad: Any, seconds: float) -> None:
    """Send a tone to the server."""
    from aiortc import (
        MediaStreamTrack,
        RTCConfiguration,
        RTCPeerConnection,
        RTCSessionDescription,
    )
    from av import AudioFrame

    class Tone(MediaStreamTrack):
        """A tone, in real time."""

        kind = "audio"

        def __init__(self) -> None:
            super().__init__()
            self._frame, self._started_s = 0, 0.0

        async def recv(self) -> AudioFrame:
            self._started_s = self._started_s or time.monotonic()
            await asyncio.sleep(self._started_s + self._frame * FRAME_S - time.monotonic())
            size = int(RATE * FRAME_S)
            at = np.arange(size) + self._frame * size
            tone = (8000 * np.sin(2 * np.pi * 220 * at / RATE)).astype(np.int16)
            frame = AudioFrame.from_ndarray(tone[None], format="s16", layout="mono")
            frame.pts, frame.sample_rate = self._frame * size, RATE
            frame.time_base = Fraction(1, RATE)
            self._frame += 1
            return frame

    async def call() -> None:
        peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        peer.addTrack(Tone())
        await peer.setLocalDescription(await peer.createOffer())
        other.send(peer.localDescription.sdp)
        answer = await asyncio.to_thread(other.recv)
        await peer.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        until_s = time.monotonic() + CONNECT_S
        while peer.connectionState != "connected":
            if time.monotonic() > until_s:
                raise InputError(f"the peers were not connected within {CONNECT_S:g} s.")
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # the first frames come in a burst
        bad.set()
        await asyncio.sleep(seconds)
        other.send(None)
        await peer.close()

    asyncio.run(call())


def websocket_server(other: Connection, bad: Any, seconds: float) -> Arrivals:
    """Serve /v1/realtime. Returns when the session had the caller's sound."""
    with made_checkpoint("tiny") as checkpoint, Qwen3Omni.load(checkpoint) as omni:
        line: Any = Line(omni, seconds)
        with serving(line, host=ADDRESSES[0]) as server:
            other.send(f"http://{ADDRESSES[0]}:{server.port}")
            other.recv()
        return framed(line.heard)


def websocket_caller(other: Connection, bad: Any, seconds: float) -> list[ChunkArrival]:
    """Ask for an answer, and speak while it comes. Returns the answer's chunks."""
    with opened(other.recv()) as socket:
        call = Call(socket, piece_ms=round(FRAME_S * 1000), now=time.monotonic)
        call.configure(audio={"input": {"turn_detection": None}})
        bad.set()
        send(socket, "response.create")
        call.speak(np.zeros(round(seconds * CALL_RATE), np.float32))
        if not call.wait(lambda: call.answers[-1].complete, CONNECT_S, silence=False):
            raise InputError(f"the answer did not end within {CONNECT_S:g} s of its last sample.")
        other.send(None)
        return call.answers[-1].chunks


class Line:
    """A model whose sessions note when they hear, and answer with sound at the speed of speech.

    heard: of each piece of a caller's speech when it came, and its seconds.
    """

    def __init__(self, omni: Qwen3Omni, seconds: float):
        """omni: model of the sessions, which computes nothing. seconds: of sound in an answer."""
        self._omni, self._seconds = omni, seconds
        self.heard: Arrivals = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._omni, name)

    def session(self, **options: Any) -> Any:
        """Return a session."""
        session: Any = self._omni.session(**options)

        def respond(speak: bool = True, **given: Any) -> Any:
            stream: Any = PacedStream(self._seconds)
            stream.reply = Reply(speak, 15.0)
            stream.reply.ended = True
            session.insert(stream.reply)
            return stream

        session.append_audio, session.respond = self._hear, respond
        return session

    def _hear(self, samples: Any, rate: float) -> None:
        self.heard.append((time.monotonic(), len(samples) / rate))


class PacedStream(ScriptedStream):
    """A reply whose chunks of 80 ms come when a speaker would begin with them."""

    def __init__(self, seconds: float):
        super().__init__(["go "] * round(seconds / 0.08), True, None)
        self._began_s = time.monotonic()

    async def __anext__(self) -> Event:
        event = await super().__anext__()
        if isinstance(event, AudioChunk):
            due_s = self._began_s + event.first_sample / SAMPLE_RATE
            await asyncio.sleep(due_s - time.monotonic())
        return event


if __name__ == "__main__":
    sys.exit(main())
