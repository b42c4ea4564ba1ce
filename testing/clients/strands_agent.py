"""A dialogue in text by an agent of Strands, which calls the tool by itself.

python -m testing.clients.strands_agent URL chat|responses
"""

import json
import sys
from typing import Any

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

looked_up: list[dict[str, str]] = []


@tool
def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    looked_up.append({"word": word})
    return "red"


def dialogue(url: str, way: str) -> dict[str, Any]:
    """Hold the dialogue. Returns the tool's arguments and the answers."""
    address = {"base_url": f"{url}/v1", "api_key": "none"}
    kind = OpenAIModel if way == "chat" else OpenAIResponsesModel
    model: Any = kind(client_args=address, model_id="gpt-4o")
    agent = Agent(model=model, tools=[look_up], callback_handler=None)
    answers = [str(agent(question)).strip() for question in ("look it up", "what is two plus four")]
    return {"calls": looked_up, "answers": answers}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dialogue(*sys.argv[1:])))
