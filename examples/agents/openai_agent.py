"""A voice agent of OpenAI's Agents SDK."""

from agents import Tool
from agents.realtime import RealtimeAgent, RealtimeRunner, RealtimeSession


async def connect(url: str, tools: list[Tool]) -> RealtimeSession:
    """Return a session with a server, such as ws://127.0.0.1:8000/v1/realtime, to enter."""
    agent = RealtimeAgent(name="Assistant", tools=tools)
    return await RealtimeRunner(agent).run(model_config={"url": url, "api_key": "none"})
