"""A conversation that is asked over HTTP: its media, its grammar, and the reading of its reply."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi.responses import Response

from qwen3_omni_neuron.events import AudioChunk, Event, TextDelta
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.endpoints.answer import Answer
from qwen3_omni_neuron.serving.endpoints.media import MediaReader
from qwen3_omni_neuron.serving.openai.chat_request import (
    ChatRequest,
    check_request,
    conversation,
    request_options,
)
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.openai.parameters import has_grammar
from qwen3_omni_neuron.serving.openai.reply import (
    Call,
    Content,
    Reasoning,
    ReplyPart,
    ReplyText,
    token_logprobs,
)
from qwen3_omni_neuron.serving.service import Service

Json = dict[str, Any]
ReplyMaker = Callable[["Question", SpeechStream], "Reply"]
"""Function that makes the reply to a question from its stream. The reply holds no media of it."""


async def answer(
    service: Service, context: Context, read: Callable[[], "Question"], in_thread: bool
) -> Response:
    """Answer one conversation, whole or in pieces.

    read: parses the body. in_thread: that may take long. Raises ApiError and the API's errors.
    """
    begun: Reply | Question
    if in_thread:
        begun = await service.model.start(lambda: read().begin())
    elif (question := read()).takes_long:
        begun = await service.model.start(question.begin)
    else:
        begun = question.answer()
    if isinstance(begun, Question):
        await begun.finish()
        begun = await service.model.start(begun.answer)
    context.release_body()
    return await begun.response()


@dataclass
class Question:
    """A parsed request whose media may still have to be decoded, and its grammar compiled.

    messages, options: arguments of the Python API. media: reader of these messages' media. reply:
    makes the reply. compiling: the grammar, while another process compiles it.
    """

    wanted: ChatRequest
    messages: list[Json]
    options: Json
    media: MediaReader
    reply: ReplyMaker
    service: Service
    context: Context
    compiling: "Future[Any] | None" = None

    @staticmethod
    def of(
        wanted: ChatRequest,
        reply: ReplyMaker,
        service: Service,
        context: Context,
        names: Sequence[str] | None = None,
    ) -> "Question":
        """Check a request, and begin to read its media. Raises ApiError.

        names: names of its messages for errors; None: messages[0] and so on.
        """
        omni = context.omni
        check_request(wanted)
        if wanted.speaks and not omni.info.speakers:
            raise ApiError(
                400,
                "this checkpoint has no talker: it can write text, not speak. Leave audio out of "
                "modalities.",
                "no_speech",
                "modalities",
            )
        voices = service.voices_of(omni)
        options = request_options(wanted, service.settings, context.owner, voices, omni.info.thinks)
        hears_videos = options.get("use_audio_in_video") is True
        media = MediaReader(service, omni, context.owner, hears_videos, context.param)
        context.warnings = media.warnings
        transcript = partial(service.replies.get, context.owner)
        messages = conversation(wanted, media.read, transcript, names)
        return Question(wanted, messages, options, media, reply, service, context)

    @property
    def takes_long(self) -> bool:
        """True where it has media to read, or a grammar to compile."""
        return self.media.pending or has_grammar(self.options)

    def begin(self) -> "Reply | Question":
        """Start the request, unless it has media or a grammar for another process.

        Raises ApiError and the API's errors.
        """
        hold = self.context.account.hold
        if has_grammar(self.options):
            self.compiling = self.context.omni.compile_grammar(hold, **self.options)
        inline = self.media.finish_inline(hold)
        return self.answer() if inline and self.compiling is None else self

    async def finish(self) -> None:
        """Wait for the grammar and the media. Raises ApiError and the API's errors."""
        try:
            if self.compiling is not None:
                self.options["grammar"] = await asyncio.wrap_future(self.compiling)
            await self.media.finish(self.context.account.hold)
        except BaseException:
            self.close()
            raise

    def count_tokens(self) -> int:
        """Return the number of tokens of its prompt. Raises the API's errors."""
        return self.context.omni.count_tokens(self.messages, **self.options)

    def answer(self) -> "Reply":
        """Start the request. Raises the API's errors."""
        wanted, context = self.wanted, self.context
        context.wanted(bool(wanted.stream), wanted.speaks)
        ask = context.omni.stream if wanted.speaks else context.omni.stream_text
        stream = ask(self.messages, **self.options)
        if self.service.settings.log_content:  # only now: a refused request may have any length
            context.question = [_texts(message) for message in self.messages]
        return self.reply(self, stream)

    def close(self) -> None:
        """Stop compiling the grammar."""
        if self.compiling is not None:
            self.compiling.cancel()


def _texts(message: Json) -> Json:
    """Return a message without its media."""
    content = message["content"]
    if not isinstance(content, str):
        content = [item.get("text", f"({item['type']})") for item in content]
    return {"role": message["role"], "content": content}


class Reply(Answer):
    """Answer to a conversation.

    _texts, _reasons, _calls: parts of the text so far.
    _logprobs: log-probabilities of the tokens of _texts, where the request asks for them.
    """

    def __init__(self, question: Question, stream: SpeechStream):
        self.wanted = question.wanted
        super().__init__(stream, question.service, question.context, bool(self.wanted.stream))
        self.wanted.messages.clear()  # frees the media, which are as large as everything else
        self._split = ReplyText(self._context.omni.info.thinks, "tools" in question.options)
        self._reasons: list[str] = []
        self._calls: list[Call] = []
        self._reasoning_tokens = 0
        self._logprobs: list[Json] = []
        self._held_logprobs: list[Json] = []  # tokens of text whose kind is not known yet

    @property
    def _reached_limit(self) -> bool:
        """True where the text has ended at its limit, or the speech that a client hears."""
        heard = None if self._calls else self._ended.talker_finish_reason
        return "length" in (self._ended.thinker_finish_reason, heard)

    def _take(self, event: Event) -> list[ReplyPart]:
        """Process an event. Returns the parts of text that it completes."""
        if isinstance(event, TextDelta):
            self._made += len(event.token_ids)
            if event.logprobs:
                spell = self._context.omni.prompt_builder.token_bytes
                self._held_logprobs += token_logprobs(event, spell)
            parts = self._split.push(event.text)
            if self._split.reasons:
                self._reasoning_tokens += len(event.token_ids)
            return self._noted(parts)
        if isinstance(event, AudioChunk):
            self._made += event.frames
            return []
        self._result = event.result
        cut = event.result.thinker_finish_reason == "length"
        return self._noted(self._split.finish(at_limit=cut))

    def _taken(self, events: Sequence[Event]) -> tuple[list[ReplyPart], AudioChunk | None]:
        """Process events that came together. Returns the parts of text, and the chunk to send.

        A tool call is not meant to be heard: from the first call on, speech is left out.
        """
        parts = _joined([part for event in events for part in self._take(event)])
        chunk = next((event for event in events if isinstance(event, AudioChunk)), None)
        return parts, None if self._calls else chunk

    def _noted(self, parts: list[ReplyPart]) -> list[ReplyPart]:
        """Add parts to the whole answer and return them.

        The first content has the log-probabilities of all tokens that they came from.
        """
        if parts:
            held, self._held_logprobs = self._held_logprobs, []
            for i, part in enumerate(parts):
                if held and isinstance(part, Content):
                    self._logprobs += held
                    parts[i], held = replace(part, logprobs=held), []
        for part in parts:
            if isinstance(part, Call):
                self._calls.append(part)
            else:
                texts = self._reasons if isinstance(part, Reasoning) else self._texts
                texts.append(part.text)
        return parts


def _joined(parts: Sequence[ReplyPart]) -> list[ReplyPart]:
    """Join adjacent parts of one kind, except calls."""
    joined: list[ReplyPart] = []
    for part in parts:
        before = joined[-1] if joined else None
        if isinstance(part, Content) and isinstance(before, Content):
            joined[-1] = Content(before.text + part.text, [*before.logprobs, *part.logprobs])
        elif isinstance(part, Reasoning) and isinstance(before, Reasoning):
            joined[-1] = Reasoning(before.text + part.text)
        else:
            joined.append(part)
    return joined
