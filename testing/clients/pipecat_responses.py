"""Two questions to Pipecat's service of responses over a WebSocket. Its argument: the URL."""

import asyncio
import json
import sys

from pipecat.frames.frames import Frame, LLMContextFrame, LLMFullResponseEndFrame, LLMTextFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.responses.llm import OpenAIResponsesLLMService


class Reader(FrameProcessor):
    """Reader of the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self._text = ""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, LLMTextFrame):
            self._text += frame.text
        elif isinstance(frame, LLMFullResponseEndFrame):
            self.answers.put_nowait(self._text)
            self._text = ""
        await self.push_frame(frame, direction)


async def main() -> None:
    url = sys.argv[1].replace("http:", "ws:")
    service = OpenAIResponsesLLMService(api_key="none", ws_url=f"{url}/v1/responses")
    reader, context, answers = Reader(), LLMContext([]), list[str]()
    task = PipelineTask(Pipeline([service, reader]))
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    for question in ("what is two plus four", "what is six plus two"):
        context.add_message({"role": "user", "content": question})
        await task.queue_frame(LLMContextFrame(context))
        answers.append(await asyncio.wait_for(reader.answers.get(), 60))
        context.add_message({"role": "assistant", "content": answers[-1]})
    await task.cancel()
    await running
    sys.stdout.write(json.dumps({"answers": answers}))


if __name__ == "__main__":
    asyncio.run(main())
