"""A voice agent of LiveKit."""

from livekit.agents import Agent, AgentSession, llm
from livekit.plugins import openai


def assistant(url: str, tools: list[llm.Tool | llm.Toolset]) -> tuple[AgentSession, Agent]:
    """Return a session over a server, such as http://127.0.0.1:8000/v1, and its agent."""
    model = openai.realtime.RealtimeModel(base_url=url, api_key="none")
    return AgentSession(llm=model), Agent(instructions="", tools=tools)
