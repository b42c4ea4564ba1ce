"""A model behind the public API whose replies a test writes, for tests of a server's answers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qwen3_omni_neuron.events import (
    SAMPLE_RATE,
    AudioChunk,
    Event,
    Finished,
    FinishReason,
    ModelInfo,
    SpeechResult,
    StageTime,
    Status,
    TextDelta,
    Timings,
)
from qwen3_omni_neuron.prompt.media.pixels import MediaSettings, Sizes


class ScriptedModel:
    """Model whose every reply is `texts`; if it speaks, a chunk of silence follows each text.

    asked: the messages and options of every request. raises: error after the texts, or None.
    reason: the text's finish reason.
    """

    transcription_instruction: str | None = None

    def __init__(
        self,
        texts: Sequence[str],
        speakers: tuple[str, ...] = ("Ethan",),
        thinks: bool = False,
        raises: Exception | None = None,
        reason: FinishReason = "stop",
    ):
        self.texts, self.raises, self.reason = texts, raises, reason
        self.info = ModelInfo(speakers, thinks, True, 1, 64, 4096)
        self.turns_by_silence = False
        self.media_settings = MediaSettings(16000, 12.5, Sizes(16, 2, 2, 1, 1 << 20))
        self.asked: list[tuple[Any, Mapping[str, Any]]] = []

    def stream(self, messages: Any, **options: Any) -> "ScriptedStream":
        self.asked.append((messages, options))
        return ScriptedStream(self.texts, True, self.raises, self.reason)

    def stream_text(self, messages: Any, **options: Any) -> "ScriptedStream":
        self.asked.append((messages, options))
        return ScriptedStream(self.texts, False, self.raises, self.reason)

    def compile_grammar(self, *_: Any, **__: Any) -> None:
        """Its replies are written: no grammar holds them."""

    def status(self) -> Status:
        return Status(0, 0, {"thinker": StageTime(0, 0.0)})

    def close(self) -> None:
        pass


class ScriptedStream:
    """Stream of a scripted reply."""

    prompt_tokens = 7

    def __init__(
        self,
        texts: Sequence[str],
        speak: bool,
        raises: Exception | None,
        reason: FinishReason = "stop",
    ):
        self._events, self._raises, self._reason = self._made(texts, speak), raises, reason
        self.keeps_audio = True

    def _made(self, texts: Sequence[str], speak: bool) -> Iterator[Event]:
        chunks = []
        for number, text in enumerate(texts):
            yield TextDelta(text, [number])
            if speak:
                chunks.append(AudioChunk(np.zeros(1920, np.float32), 1920 * number, 1))
                yield chunks[-1]
        if self._raises is not None:
            raise self._raises
        audio = np.concatenate([np.zeros(0, np.float32), *(c.samples for c in chunks)])
        seconds = len(audio) / SAMPLE_RATE
        timings = Timings(0.0, 0.1, 0.2, 0.3, seconds, 0.1, 7, 0, len(texts), len(chunks))
        yield Finished(
            SpeechResult(
                "".join(texts),
                list(range(len(texts))),
                np.zeros((len(chunks), 16), np.int64),
                audio,
                SAMPLE_RATE,
                self._reason,
                "stop" if speak else "no_speech",
                timings,
                0,
            )
        )

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __aiter__(self) -> "ScriptedStream":
        return self

    async def __anext__(self) -> Event:
        for event in self._events:
            return event
        raise StopAsyncIteration

    async def ready(self, delay_s: float) -> list[Event]:
        events = [await anext(self)]
        while isinstance(events[-1], TextDelta):
            try:
                event = next(self._events)
            except Exception as error:  # the texts come before it
                self._events = map(_raise, [error])
                break
            if isinstance(event, Finished):
                self._events = iter([event])
                break
            events.append(event)
        return events

    def close(self) -> None:
        self._events = iter(())

    def __enter__(self) -> "ScriptedStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raise(error: Exception) -> Event:
    raise error
