"""A spoken dialogue by openai-python's realtime connection.

python -m testing.clients.openai_python URL CLIPS
"""

import asyncio
import base64
import json
import sys
from typing import Any

from openai import AsyncOpenAI

from testing.clients.microphone import LONG, QUESTION, RATE, SUM, Microphone

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look_up",
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}


async def dialogue(url: str, clips: str) -> dict[str, Any]:
    """Hold the dialogue. Returns what was heard: answers, calls, interruptions, seconds."""
    answers: list[str] = []
    calls: list[Any] = []
    sound: dict[str, int] = {}  # bytes by item
    interrupted: set[str | None] = set()  # items
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    async with client, client.realtime.connect(model="gpt-realtime") as connection:
        await connection.session.update(session={"type": "realtime", "tools": [TOOL]})  # type: ignore[list-item]

        async def append(piece: bytes) -> None:
            await connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())

        microphone = Microphone(clips, append)
        running = asyncio.create_task(microphone.run())
        microphone.say(QUESTION)
        async for event in connection:
            if event.type == "error":
                raise RuntimeError(event.error.message)
            if event.type == "response.output_audio.delta":
                if len(answers) == 1 and event.item_id not in sound:
                    microphone.say(SUM)
                size = len(base64.b64decode(event.delta))
                sound[event.item_id] = sound.get(event.item_id, 0) + size
            elif event.type == "conversation.item.truncated":
                interrupted.add(event.item_id)
            elif event.type == "response.done":
                for item in event.response.output or []:
                    if item.type == "function_call":
                        calls.append(json.loads(item.arguments))
                        result: Any = {"type": "function_call_output", "output": "red"}
                        result["call_id"] = item.call_id
                        await connection.conversation.item.create(item=result)
                        await connection.response.create()
                    elif item.type == "message":
                        if event.response.status == "cancelled":  # all that came was played
                            interrupted.add(item.id)
                        answers.append(getattr(item.content[0], "transcript", ""))
                if len(answers) == 1:
                    await asyncio.sleep(sum(sound.values()) / 2 / RATE)  # until it was played
                    microphone.say(LONG)
                if len(answers) == 3:
                    break
        running.cancel()
    seconds = [round(size / 2 / RATE, 3) for size in sound.values()]
    cut = [number for number, item in enumerate(sound) if item in interrupted]
    return {"answers": answers, "calls": calls, "interrupted": cut, "seconds": seconds}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(dialogue(*sys.argv[1:]))))
