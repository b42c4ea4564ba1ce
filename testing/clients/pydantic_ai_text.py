"""A dialogue in text by an agent of Pydantic AI, which calls the tool by itself.

python -m testing.clients.pydantic_ai_text URL chat|responses
"""

import json
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Colour(BaseModel):
    """Structured reply."""

    colour: Literal["red", "blue"]


def dialogue(url: str, way: str) -> dict[str, Any]:
    """Hold the dialogue. Returns the tool's arguments, the answers and a structured one."""
    calls: list[dict[str, Any]] = []
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    kind = OpenAIChatModel if way == "chat" else OpenAIResponsesModel
    model: Any = kind("gpt-4o", provider=provider)
    agent = Agent(model)

    @agent.tool_plain
    def look_up(word: str) -> str:
        """Look a word up."""
        calls.append({"word": word})
        return "red"

    first = agent.run_sync("look it up")
    history = first.all_messages()
    second = agent.run_stream_sync("what is two plus four", message_history=history).get_output()
    made = Agent(model, output_type=NativeOutput(Colour)).run_sync("say red").output
    return {"calls": calls, "answers": [first.output, second], "object": made.model_dump()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dialogue(*sys.argv[1:])))
