"""A voice agent of OpenAI's Agents SDK that looks words up."""

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeRunner, RealtimeSession

looked_up: list[str] = []


@function_tool
def look_up(word: str) -> str:
    """Look a word up."""
    looked_up.append(word)
    return "red"


async def connect(url: str) -> RealtimeSession:
    """Return a session with a server, such as ws://127.0.0.1:8000/v1/realtime, to enter."""
    agent = RealtimeAgent(name="Assistant", tools=[look_up])
    return await RealtimeRunner(agent).run(model_config={"url": url, "api_key": "none"})
