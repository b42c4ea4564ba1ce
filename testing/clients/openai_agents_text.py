"""A dialogue in text by the agent of OpenAI's Agents SDK for Python, which calls the tool itself.

python -m testing.clients.openai_agents_text URL chat|responses
"""

import json
import sys
from typing import Any

from agents import (
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

looked_up: list[dict[str, str]] = []


@function_tool
def look_up(word: str) -> str:
    """Look a word up."""
    looked_up.append({"word": word})
    return "red"


async def dialogue(url: str, way: str) -> dict[str, Any]:
    """Hold the dialogue: a turn whole, one streamed. Returns the tool's arguments, the answers."""
    set_tracing_disabled(True)  # traces go to OpenAI
    set_default_openai_client(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    if way == "chat":
        set_default_openai_api("chat_completions")
    agent = Agent(name="Assistant", tools=[look_up])
    first = await Runner.run(agent, "look it up")
    question = [{"role": "user", "content": "what is two plus four"}]
    second = Runner.run_streamed(agent, first.to_input_list() + question)
    async for _ in second.stream_events():
        pass
    return {"calls": looked_up, "answers": [first.final_output, second.final_output]}


if __name__ == "__main__":
    import asyncio

    sys.stdout.write(json.dumps(asyncio.run(dialogue(*sys.argv[1:]))))
