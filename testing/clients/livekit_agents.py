"""A spoken dialogue by an AgentSession of LiveKit, without a room: a microphone and a player.

Its arguments are the server's URL and the folder of the clips. It writes the result as JSON.
"""

import asyncio
import json
import sys
import time
from typing import Any

from livekit import rtc
from livekit.agents import function_tool
from livekit.agents.utils import http_context
from livekit.agents.voice import io

from examples.agents.livekit_agent import assistant
from testing.clients.microphone import LONG, PIECE_MS, QUESTION, RATE, SUM, Microphone

looked_up: list[str] = []


@function_tool
async def look_up(word: str) -> str:
    """Look a word up."""
    looked_up.append(word)
    return "red"


class Ears(io.AudioInput):
    """Sound for the session."""

    def __init__(self) -> None:
        super().__init__(label="microphone")
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def put(self, piece: bytes) -> None:
        await self._pieces.put(piece)

    async def __anext__(self) -> rtc.AudioFrame:
        return rtc.AudioFrame(await self._pieces.get(), RATE, 1, RATE * PIECE_MS // 1000)


class Player(io.AudioOutput):
    """Player of the session's sound in real time. seconds: those of each answer's sound."""

    def __init__(self) -> None:
        capabilities = io.AudioOutputCapabilities(pause=False)
        super().__init__(label="player", capabilities=capabilities, sample_rate=RATE)
        self.seconds: list[float] = []
        self.began = asyncio.Event()
        self._cleared = asyncio.Event()
        self._pushed_s, self._from_s = 0.0, 0.0
        self._playing: set[asyncio.Task[None]] = set()

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self._pushed_s:
            self._from_s = time.time()
            self._cleared.clear()
            self.seconds.append(0.0)
            self.began.set()
            self.on_playback_started(created_at=self._from_s)
        self._pushed_s += frame.duration
        self.seconds[-1] = round(self._pushed_s, 3)

    def flush(self) -> None:
        super().flush()
        if self._pushed_s:
            task = asyncio.create_task(self._play(self._pushed_s, self._from_s))
            self._playing.add(task)
            task.add_done_callback(self._playing.discard)
            self._pushed_s = 0.0

    def clear_buffer(self) -> None:
        self._cleared.set()

    async def _play(self, pushed_s: float, from_s: float) -> None:
        try:
            left_s = max(0.0, from_s + pushed_s - time.time())
            await asyncio.wait_for(self._cleared.wait(), left_s)
        except asyncio.TimeoutError:
            self.on_playback_finished(playback_position=pushed_s, interrupted=False)
        else:
            played_s = min(pushed_s, time.time() - from_s)
            self.on_playback_finished(playback_position=played_s, interrupted=True)


async def dialogue(url: str, clips: str) -> dict[str, Any]:
    """Hold the dialogue. Returns what was heard: answers, calls, interruptions, seconds."""
    answers: list[str] = []
    interrupted: list[int] = []
    added: asyncio.Queue[Any] = asyncio.Queue()
    async with http_context.open():  # which a worker has opened for its jobs
        session: Any
        session, agent = assistant(f"{url}/v1", [look_up])
        ears, player = Ears(), Player()
        session.input.audio, session.output.audio = ears, player
        session.on("conversation_item_added", lambda event: added.put_nowait(event.item))
        session.on("error", lambda event: added.put_nowait(event.error))
        await session.start(agent=agent)
        microphone = Microphone(clips, ears.put)
        running = asyncio.create_task(microphone.run())
        microphone.say(QUESTION)
        while len(answers) < 3:
            item = await added.get()
            if isinstance(item, Exception) or not hasattr(item, "role"):
                if hasattr(item, "error"):
                    raise RuntimeError(str(item.error))
                continue
            if item.role != "assistant" or not item.text_content:
                continue
            answers.append(item.text_content)
            if item.interrupted:
                interrupted.append(len(answers) - 1)
            if len(answers) == 1:
                player.began.clear()
                microphone.say(LONG)
                await player.began.wait()
                microphone.say(SUM)
        running.cancel()
        await session.aclose()
    return {
        "answers": answers,
        "calls": [{"word": word} for word in looked_up],
        "interrupted": interrupted,
        "seconds": player.seconds,
    }


if __name__ == "__main__":
    result = asyncio.run(dialogue(*sys.argv[1:]))
    sys.stdout.write(json.dumps(result))
