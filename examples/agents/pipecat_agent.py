"""A voice agent of Pipecat that looks words up."""

from pipecat.adapters.schemas.function_schema import FunctionSchema
from pipecat.adapters.schemas.tools_schema import ToolsSchema
from pipecat.pipeline.pipeline import Pipeline
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.transports.base_transport import BaseTransport

TOOL = FunctionSchema("look_up", "Look a word up.", {"word": {"type": "string"}}, ["word"])
looked_up: list[str] = []


async def look_up(call: FunctionCallParams) -> None:
    """Look a word up."""
    looked_up.append(call.arguments["word"])
    await call.result_callback("red")


def assistant(url: str, transport: BaseTransport) -> Pipeline:
    """Return the pipeline of an agent over a server, such as ws://127.0.0.1:8000/v1/realtime."""
    model = OpenAIRealtimeLLMService(api_key="none", base_url=url)
    model.register_function("look_up", look_up)
    greeting = LLMContext([{"role": "user", "content": "say three"}], tools=ToolsSchema([TOOL]))
    sides = LLMContextAggregatorPair(greeting)
    parts = [transport.input(), sides.user(), model, transport.output(), sides.assistant()]
    return Pipeline(parts)
