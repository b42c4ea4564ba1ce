"""A spoken dialogue by DashScope's realtime class, which sends 16 kHz and reads Qwen's own events.

python -m testing.clients.dashscope_realtime URL CLIPS
"""

import asyncio
import base64
import json
import sys
from array import array
from typing import Any

from dashscope.audio.qwen_omni import MultiModality, OmniRealtimeCallback, OmniRealtimeConversation

from testing.clients.microphone import LONG, QUESTION, RATE, SUM, Microphone

LOOK_UP = {
    "name": "look_up",
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}
TOOL = {"type": "function", "function": LOOK_UP}
WAIT_S = 30.0


class Heard(OmniRealtimeCallback):
    """Queue of the server's events, which come in a thread of the class."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def on_event(self, message: Any) -> None:
        self._loop.call_soon_threadsafe(self.events.put_nowait, message)


def at_16_khz(piece: bytes) -> bytes:
    """Return 16-bit samples of 24 kHz at 16 kHz: of every three samples two."""
    given = array("h", piece)
    made = array("h", bytes(len(given) // 3 * 4))
    made[::2] = given[::3]
    made[1::2] = array("h", ((a + b) // 2 for a, b in zip(given[1::3], given[2::3], strict=True)))
    return made.tobytes()


async def dialogue(url: str, clips: str) -> dict[str, Any]:
    """Hold the dialogue. Returns what was heard: answers, calls, interruptions, seconds."""
    answers: list[str] = []
    calls: list[Any] = []
    sound: dict[str, int] = {}  # bytes by item
    interrupted: set[str] = set()  # items
    heard = Heard()
    conversation = OmniRealtimeConversation(
        model="qwen3-omni-flash-realtime",
        callback=heard,
        url=f"{url.replace('http', 'ws', 1)}/v1/realtime",
        api_key="none",
    )
    await asyncio.to_thread(conversation.connect)
    spoken = [MultiModality.AUDIO, MultiModality.TEXT]
    conversation.update_session(spoken, voice="Cherry", tools=[TOOL])

    async def append(piece: bytes) -> None:
        conversation.append_audio(base64.b64encode(at_16_khz(piece)).decode())

    microphone = Microphone(clips, append)
    running = asyncio.create_task(microphone.run())
    microphone.say(QUESTION)
    while len(answers) < 3:
        event = await asyncio.wait_for(heard.events.get(), WAIT_S)
        if event["type"] == "error":
            raise RuntimeError(event["error"]["message"])
        if event["type"] == "response.audio.delta":
            if len(answers) == 1 and event["item_id"] not in sound:
                microphone.say(SUM)
            size = len(base64.b64decode(event["delta"]))
            sound[event["item_id"]] = sound.get(event["item_id"], 0) + size
        elif event["type"] == "conversation.item.truncated":
            interrupted.add(event["item_id"])
        elif event["type"] == "response.done":
            for item in event["response"]["output"]:
                if item["type"] == "function_call":
                    calls.append(json.loads(item["arguments"]))
                    result = {"type": "function_call_output", "output": "red"}
                    conversation.create_item({**result, "call_id": item["call_id"]})
                    conversation.create_response()
                elif item["type"] == "message":
                    if event["response"]["status"] == "cancelled":  # all that came was played
                        interrupted.add(item["id"])
                    answers.append(item["content"][0].get("transcript", ""))
            if len(answers) == 1:
                await asyncio.sleep(sum(sound.values()) / 2 / RATE)  # until it was played
                microphone.say(LONG)
    running.cancel()
    await asyncio.to_thread(conversation.end_session)
    seconds = [round(size / 2 / RATE, 3) for size in sound.values()]
    cut = [number for number, item in enumerate(sound) if item in interrupted]
    return {"answers": answers, "calls": calls, "interrupted": cut, "seconds": seconds}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(dialogue(*sys.argv[1:]))))
