"""A spoken dialogue by a pipeline of Pipecat, which speaks first: a greeting comes before it.

Its arguments are the server's URL and the folder of the clips. It writes the result as JSON.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
)
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams

from examples.agents.pipecat_agent import assistant
from testing.clients.microphone import LONG, QUESTION, RATE, SUM, Microphone

looked_up: list[str] = []


async def look_up(params: FunctionCallParams, word: str) -> None:
    """Look a word up."""
    looked_up.append(word)
    await params.result_callback("red")


class Listener(FrameProcessor):
    """Listener to the replies. answers: text of each; sizes: bytes of each one's sound."""

    def __init__(self) -> None:
        super().__init__()
        self.microphone: Any = None
        self.answers, self.sizes = list[str](), list[int]()
        self.interrupted: list[int] = []
        self.done = asyncio.Event()
        self.error: str | None = None
        self._text, self._size = "", 0

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSTextFrame):
            self._text += frame.text
        elif isinstance(frame, TTSAudioRawFrame):
            if len(self.answers) == 2 and not self._size:
                self.microphone.say(SUM)
            self._size += len(frame.audio)
        elif isinstance(frame, InterruptionFrame):
            if len(self.answers) + bool(self._size) == 3:
                self.interrupted.append(2)
        elif isinstance(frame, ErrorFrame):
            self.error = frame.error
            self.done.set()
        elif isinstance(frame, LLMFullResponseEndFrame) and self._size:
            self.answers.append(self._text)
            self.sizes.append(self._size)
            played_s = self._size / 2 / RATE
            self._text, self._size = "", 0
            words = {1: QUESTION, 2: LONG}.get(len(self.answers))
            if words is not None:
                asyncio.get_running_loop().call_later(played_s, self.microphone.say, words)
            elif len(self.answers) == 4:
                self.done.set()
        await self.push_frame(frame, direction)


class Passage(FrameProcessor):
    """Processor that hands every frame on: the microphone's frames come from the task."""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        await self.push_frame(frame, direction)


async def dialogue(url: str, clips: str) -> dict[str, Any]:
    """Hold the dialogue. Returns what was heard: answers, calls, interruptions, seconds."""
    listener = Listener()
    transport: Any = SimpleNamespace(input=Passage, output=lambda: listener)
    context = LLMContext([{"role": "user", "content": "say three"}], tools=[look_up])
    agent = assistant(f"{url.replace('http', 'ws', 1)}/v1/realtime", context, transport)
    task = PipelineTask(agent, params=PipelineParams(audio_in_sample_rate=RATE))

    async def hear(piece: bytes) -> None:
        await task.queue_frame(InputAudioRawFrame(piece, RATE, 1))

    listener.microphone = Microphone(clips, hear)
    beside = [asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))]
    await task.queue_frame(LLMRunFrame())
    beside.append(asyncio.create_task(listener.microphone.run()))
    await listener.done.wait()
    if listener.error is not None:
        raise RuntimeError(listener.error)
    beside[1].cancel()
    await task.cancel()
    return {
        "answers": listener.answers[1:],
        "calls": [{"word": word} for word in looked_up],
        "interrupted": sorted({number - 1 for number in listener.interrupted}),
        "seconds": [round(size / 2 / RATE, 3) for size in listener.sizes[1:]],
    }


if __name__ == "__main__":
    result = asyncio.run(dialogue(*sys.argv[1:]))
    sys.stdout.write(json.dumps(result))
