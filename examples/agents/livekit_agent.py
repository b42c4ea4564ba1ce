"""A voice agent of LiveKit that looks words up."""

from livekit.agents import Agent, AgentSession, function_tool
from livekit.plugins import openai

looked_up: list[str] = []


@function_tool
async def look_up(word: str) -> str:
    """Look a word up."""
    looked_up.append(word)
    return "red"


def assistant(url: str) -> tuple[AgentSession, Agent]:
    """Return a session over a server, such as http://127.0.0.1:8000/v1, and its agent."""
    model = openai.realtime.RealtimeModel(base_url=url, api_key="none")
    return AgentSession(llm=model), Agent(instructions="", tools=[look_up])
