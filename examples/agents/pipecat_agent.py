"""A voice agent of Pipecat."""

from pipecat.pipeline.pipeline import Pipeline
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.transports.base_transport import BaseTransport


def assistant(url: str, context: LLMContext, transport: BaseTransport) -> Pipeline:
    """Return the pipeline of an agent over a server, such as ws://127.0.0.1:8000/v1/realtime."""
    model = OpenAIRealtimeLLMService(api_key="none", base_url=url)
    user, own = LLMContextAggregatorPair(context)
    return Pipeline([transport.input(), user, model, transport.output(), own])
