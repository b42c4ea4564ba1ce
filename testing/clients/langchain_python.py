"""A dialogue in text by LangChain's chat model for Python, streamed, and a call that is asked for.

python -m testing.clients.langchain_python URL chat|responses
"""

import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Colour(BaseModel):
    """Structured reply."""

    colour: Literal["red", "blue"]


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return "red"


@tool
def paint(colour: Literal["red", "blue"]) -> str:
    """Paint it."""
    return colour


def dialogue(url: str, way: str) -> dict[str, Any]:
    """Hold the dialogue. Returns the tool's arguments, the answers and a structured one."""
    model = ChatOpenAI(
        model="gpt-4o",
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=way == "responses",
    )
    with_tools = model.bind_tools([look_up])
    messages: list[Any] = [HumanMessage("look it up")]
    calls, answers = [], []
    asked = with_tools.invoke(messages)
    messages.append(asked)
    for call in asked.tool_calls:
        calls.append(call["args"])
        messages.append(ToolMessage(look_up.invoke(call["args"]), tool_call_id=call["id"]))
    for question in (None, "what is two plus four"):
        if question is not None:
            messages.append(HumanMessage(question))
        whole = None
        for chunk in with_tools.stream(messages):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        messages.append(whole)
        answers.append(str(whole.text))
    made: Any = model.with_structured_output(Colour).invoke("say red")
    painter = model.bind_tools([look_up, paint], tool_choice="paint", strict=True)
    named: Any = painter.invoke("say red")
    return {
        "calls": calls,
        "answers": answers,
        "object": made.model_dump(),
        "named": [call["name"] for call in named.tool_calls],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dialogue(*sys.argv[1:])))
