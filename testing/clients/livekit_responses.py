"""Two questions to LiveKit's model of responses over a WebSocket. Its argument: the URL."""

import asyncio
import json
import sys

from livekit.agents import llm
from livekit.agents.utils import http_context
from livekit.plugins import openai


async def main() -> None:
    answers, context = list[str](), llm.ChatContext.empty()
    async with http_context.open():
        model = openai.responses.LLM(base_url=f"{sys.argv[1]}/v1", api_key="none")
        for question in ("what is two plus four", "what is six plus two"):
            context.add_message(role="user", content=question)
            pieces = [piece.delta async for piece in model.chat(chat_ctx=context)]
            answers.append("".join(piece.content or "" for piece in pieces if piece))
            context.add_message(role="assistant", content=answers[-1])
        await model.aclose()
    sys.stdout.write(json.dumps({"answers": answers}))


if __name__ == "__main__":
    asyncio.run(main())
