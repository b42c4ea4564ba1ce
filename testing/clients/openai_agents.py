"""A spoken dialogue by the agent of OpenAI's Agents SDK for Python, which calls the tool by itself.

python -m testing.clients.openai_agents URL CLIPS
"""

import asyncio
import json
import sys
from typing import Any

from agents import function_tool

from examples.agents.openai_agent import connect
from testing.clients.microphone import LONG, QUESTION, RATE, SUM, Microphone

looked_up: list[str] = []


@function_tool
def look_up(word: str) -> str:
    """Look a word up."""
    looked_up.append(word)
    return "red"


async def dialogue(url: str, clips: str) -> dict[str, Any]:
    """Hold the dialogue. Returns what was heard: answers, calls, interruptions, seconds."""
    texts: dict[str, str] = {}  # by item
    sound: dict[str, int] = {}
    interrupted: list[str] = []
    address = f"{url.replace('http', 'ws', 1)}/v1/realtime"
    async with await connect(address, [look_up]) as session:
        microphone = Microphone(clips, session.send_audio)
        running = asyncio.create_task(microphone.run())
        microphone.say(QUESTION)
        async for event in session:
            if event.type == "error":
                raise RuntimeError(str(event.error))
            if event.type == "audio":
                if len(sound) == 1 and event.item_id not in sound:
                    microphone.say(SUM)
                size = len(event.audio.data)
                sound[event.item_id] = sound.get(event.item_id, 0) + size
            elif event.type == "audio_interrupted" and len(sound) == 2:
                interrupted.append(event.item_id)  # said of what was played to its end, too
            elif event.type == "raw_model_event" and event.data.type == "transcript_delta":
                item = event.data.item_id
                texts[item] = texts.get(item, "") + event.data.delta
            elif event.type == "raw_model_event" and event.data.type == "turn_ended":
                if len(texts) == 1:
                    await asyncio.sleep(sum(sound.values()) / 2 / RATE)  # until it was played
                    microphone.say(LONG)
                if len(texts) == 3:
                    break
        running.cancel()
    seconds = [round(size / 2 / RATE, 3) for size in sound.values()]
    cut = [list(sound).index(item) for item in interrupted]
    return {
        "answers": list(texts.values()),
        "calls": [{"word": word} for word in looked_up],
        "interrupted": cut,
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(dialogue(*sys.argv[1:]))))
