"""Microphone of a client that is tested: clips in real time, and silence between them.

It and the clients beside it run in environments that have nothing but the client's packages.
"""

import asyncio
import wave
from collections.abc import Awaitable, Callable
from pathlib import Path

RATE = 24000
PIECE_MS = 20
_PIECE_BYTES = 2 * RATE * PIECE_MS // 1000
QUESTION, LONG, SUM = "question", "long", "sum"
"""Names of the clips: one that is answered by a call, one with a long answer, and a sum."""


class Microphone:
    """Microphone that sends pieces of 16-bit samples at RATE for as long as `run` runs."""

    def __init__(self, folder: str, send: Callable[[bytes], Awaitable[None]]):
        """folder: clips, as NAME.wav. send: sends one piece."""
        self._folder, self._send = Path(folder), send
        self._left = b""

    def say(self, name: str) -> None:
        """Speak a clip from now on."""
        with wave.open(str(self._folder / f"{name}.wav")) as file:
            assert file.getframerate() == RATE
            self._left = file.readframes(file.getnframes())

    async def run(self) -> None:
        """Send a piece every PIECE_MS, for ever."""
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        while True:
            piece, self._left = self._left[:_PIECE_BYTES], self._left[_PIECE_BYTES:]
            await self._send(piece.ljust(_PIECE_BYTES, b"\0"))
            at_s += PIECE_MS / 1000
            await asyncio.sleep(max(0.0, at_s - loop.time()))
