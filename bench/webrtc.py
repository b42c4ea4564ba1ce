"""Speech through aiortc over a network that loses packets: how it stalls, and what is missing.

    pip install aiortc
    python -m bench.webrtc --loss 0,1,3 --jitter-ms 0,30 --seconds 60 --json webrtc.json

Two peers of aiortc in this process, with a relay of UDP packets between them on loopback: once they
are connected, a packet is lost with the probability of --loss, in percent, and waits for a time
drawn from 0 to --jitter-ms. One peer sends Opus in packets of 20 ms; the other one is a server that
would hand the samples on. A row is a pair of loss and jitter:

- frames: of 20 ms, received; missing_ms: sound of lost packets, which aiortc does not fill;
- stall_ms: what the wait for a frame exceeds 20 ms, its 95th percentile and maximum; stalls: those
  of more than 60 ms, a minute;
- behind_ms: how much later than the earliest one, by their times of recording, frames are handed
  out: median and 95th percentile.

The same for a WebSocket needs a kernel whose TCP loses packets (tc's netem): not measured here.
"""

import argparse
import asyncio
import random
import re
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from bench.common.command_line import Figures, InputError, Row, parser_of, positive, run

RATE, FRAME_S, STALL_MS = 48_000, 0.02, 60.0
CONNECT_S = 20.0  # longest wait for the peers to be connected
CANDIDATE = re.compile(r"(a=candidate:\S+ \d \w+ \d+) (\S+) (\d+) (typ host[^\r\n]*)")
Address = tuple[str, int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("webrtc", __doc__)
    parser.add_argument("--loss", type=percents, default="0,1,3", help="percent of packets lost")
    parser.add_argument("--jitter-ms", type=percents, default="0,30")
    parser.add_argument("--seconds", type=positive, default=60, help="of sound, each")
    return run("webrtc", parser, measure, arguments)


def percents(text: str) -> list[float]:
    """Parse numbers of 0 and more, separated by commas."""
    values = [float(part) for part in text.split(",")]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"numbers of 0 and more, got {text}")
    return values


def measure(options: argparse.Namespace) -> Figures:
    """Send sound over each network: a row each."""
    try:
        import aiortc  # noqa: F401, imported here for the error
    except ImportError:
        raise InputError("aiortc is not installed: pip install aiortc") from None
    rows = []
    for jitter_ms in options.jitter_ms:
        for loss in options.loss:
            relay = Relay(loss / 100, jitter_ms / 1000, random.Random(1))
            arrivals = asyncio.run(sent(relay, options.seconds))
            rows.append({"loss_percent": loss, "jitter_ms": jitter_ms, **figures(arrivals)})
    return rows, {"longest_stall_ms": max(row["stall_ms_max"] for row in rows)}


def figures(arrivals: Sequence[tuple[float, float]]) -> Row:
    """Return the figures of frames that were handed out.

    arrivals: of each frame when it was handed out and when its sound began, seconds by any clocks.
    """
    if len(arrivals) < 2:
        raise InputError(f"{len(arrivals)} frames were received: nothing can be measured.")
    out_s, spoken_s = np.array(arrivals).T
    stall_ms = np.maximum(0, np.diff(out_s) - FRAME_S) * 1e3
    behind_ms = (out_s - spoken_s - (out_s - spoken_s).min()) * 1e3
    minutes = (out_s[-1] - out_s[0]) / 60
    return {
        "frames": len(arrivals),
        "missing_ms": round(float((np.diff(spoken_s) - FRAME_S).sum() * 1e3)),
        "stall_ms_p95": round(float(np.percentile(stall_ms, 95)), 1),
        "stall_ms_max": round(float(stall_ms.max()), 1),
        "stalls": round(float((stall_ms > STALL_MS).sum() / minutes), 1),
        "behind_ms": round(float(np.median(behind_ms)), 1),
        "behind_ms_p95": round(float(np.percentile(behind_ms, 95)), 1),
    }


class Relay:
    """Two sockets of loopback, one for each peer. What comes in at one goes out at the other.

    loss: probability; jitter_s: longest time that a packet waits. Both begin with `worse`.
    """

    def __init__(self, loss: float, jitter_s: float, draw: random.Random):
        self.worse = False
        self._loss, self._jitter_s, self._draw = loss, jitter_s, draw
        self._sides: list[asyncio.DatagramTransport] = []
        self._peers: list[Address | None] = [None, None]

    async def open(self) -> list[Address]:
        """Open the sockets. Returns their addresses."""
        loop = asyncio.get_running_loop()
        for side in range(2):
            made, _ = await loop.create_datagram_endpoint(
                partial(_Side, self, side), ("127.0.0.1", 0)
            )
            self._sides.append(made)
        return [made.get_extra_info("sockname") for made in self._sides]

    def connect(self, side: int, peer: Address) -> None:
        """Set the address of a side's peer."""
        self._peers[side] = peer

    def take(self, side: int, data: bytes) -> None:
        """Take a packet that came in at a side."""
        if self.worse and self._draw.random() < self._loss:
            return
        wait_s = self._draw.uniform(0, self._jitter_s) if self.worse else 0.0
        asyncio.get_running_loop().call_later(wait_s, self._send, 1 - side, data)

    def close(self) -> None:
        """Close the sockets."""
        for made in self._sides:
            made.close()

    def _send(self, side: int, data: bytes) -> None:
        peer = self._peers[side]
        if peer is not None and not self._sides[side].is_closing():
            self._sides[side].sendto(data, peer)


class _Side(asyncio.DatagramProtocol):
    def __init__(self, relay: Relay, side: int):
        self._relay, self._side = relay, side

    def datagram_received(self, data: bytes, addr: Address) -> None:
        self._relay.take(self._side, data)


def through(sdp: str, relay: Address) -> tuple[str, Address]:
    """Replace a description's candidates by the relay's address. Returns the first of them, too."""
    found = CANDIDATE.search(sdp)
    if found is None:
        raise InputError("aiortc has named no address of this machine to receive at.")
    one = f"{found[1]} {relay[0]} {relay[1]} {found[4]}"
    lines = [line for line in sdp.splitlines() if not line.startswith("a=candidate")]
    place = lines.index("a=end-of-candidates")
    return "\r\n".join([*lines[:place], one, *lines[place:], ""]), (found[2], int(found[3]))


async def sent(relay: Relay, seconds: int) -> list[tuple[float, float]]:
    """Send sound from one peer to the other. Returns the frames as `figures` takes them."""
    from aiortc import MediaStreamTrack, RTCPeerConnection, RTCSessionDescription
    from aiortc.mediastreams import MediaStreamError
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

    arrivals: list[tuple[float, float]] = []
    sender, receiver = RTCPeerConnection(), RTCPeerConnection()
    reading: list[asyncio.Task[None]] = []

    async def read(track: Any) -> None:
        try:
            while True:
                frame = await track.recv()
                if relay.worse:
                    arrivals.append((time.monotonic(), float(frame.pts * frame.time_base)))
        except MediaStreamError:
            return  # the other peer was closed

    receiver.on("track", lambda track: reading.append(asyncio.ensure_future(read(track))))
    try:
        sides = await relay.open()
        sender.addTrack(Tone())
        await sender.setLocalDescription(await sender.createOffer())
        offer, peer = through(sender.localDescription.sdp, sides[1])
        relay.connect(0, peer)
        await receiver.setRemoteDescription(RTCSessionDescription(offer, "offer"))
        await receiver.setLocalDescription(await receiver.createAnswer())
        answer, peer = through(receiver.localDescription.sdp, sides[0])
        relay.connect(1, peer)
        await sender.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        until_s = time.monotonic() + CONNECT_S
        while receiver.connectionState != "connected":
            if time.monotonic() > until_s:
                raise InputError(f"the peers were not connected within {CONNECT_S:g} s.")
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # the first frames come in a burst
        relay.worse = True
        await asyncio.sleep(seconds)
    finally:
        await sender.close()
        await receiver.close()
        relay.close()
        await asyncio.gather(*reading)
    return arrivals


if __name__ == "__main__":
    sys.exit(main())
