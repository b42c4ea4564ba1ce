"""POST /v1/completions: a raw prompt in, its continuation out, in text."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from qwen3_omni_neuron.events import Event, Finished, TextDelta
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.serving.edge.context import Context
from qwen3_omni_neuron.serving.endpoints.answer import DONE, Answer, json_event, parts_of
from qwen3_omni_neuron.serving.json_bytes import to_json
from qwen3_omni_neuron.serving.openai.bodies import OneOf, check_model, parse_json
from qwen3_omni_neuron.serving.openai.chat_request import (
    CHAT_OPTIONS,
    StreamOptions,
    TextRequest,
    text_options,
)
from qwen3_omni_neuron.serving.openai.errors import wrong_value
from qwen3_omni_neuron.serving.openai.fields import (
    COMPLETIONS,
    REFUSED_IN_COMPLETIONS,
    bounded_options,
    check_lengths,
    check_only,
    further_fields,
)
from qwen3_omni_neuron.serving.openai.openapi import takes_json
from qwen3_omni_neuron.serving.openai.reply import (
    completion_usage,
    new_id,
    running_usage,
    text_logprobs,
)
from qwen3_omni_neuron.serving.service import Service

router = APIRouter()
Json = dict[str, Any]
# A request's text options beside OpenAI's fields.
_OWN_OPTIONS = frozenset(name for name in CHAT_OPTIONS if name.startswith("thinker_"))
MOST_LOGPROBS = 20
RawPrompt = Annotated[
    str | list[Any], OneOf("a string or a list of one string, of token ids, or of one list of them")
]


class CompletionRequest(TextRequest):
    """Body of POST /v1/completions.

    prompt: a text, token ids, or a list of one of these. logprobs: number of likeliest tokens per
    token. echo: text and log-probabilities begin with the prompt's.
    """

    further = further_fields(COMPLETIONS, _OWN_OPTIONS, REFUSED_IN_COMPLETIONS)
    prompt: RawPrompt
    max_tokens: int | None = Field(16, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    stream_options: StreamOptions | None = None


@router.post(COMPLETIONS, **takes_json(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue a prompt, without a chat template."""
    service, context = parts_of(request)
    context.param = "prompt"
    reply = await service.readers.run(context.owner, _start, service, context)
    context.release_body()
    return await reply.response()


def _start(service: Service, context: Context) -> "Completion":
    wanted = parse_json(CompletionRequest, context.body)
    check_model(service, wanted.model)
    check_only(wanted.model_extra or {}, REFUSED_IN_COMPLETIONS)
    for name, given in (("echo", wanted.echo), ("logprobs", wanted.logprobs is not None)):
        if given and wanted.stream:
            raise wrong_value(f"{name} can't be streamed. Send stream: false.", name)
    if wanted.max_tokens == 0 and not wanted.echo:
        raise wrong_value("max_tokens can only be 0 with echo: true.", "max_tokens")
    prompt = _prompt_of(wanted)
    service.count_without_effect(COMPLETIONS, wanted)
    if service.settings.log_content:
        context.question = prompt
    own = (wanted.model_extra or {}).get("thinker_max_new_tokens")
    most = {"thinker_max_new_tokens": wanted.max_tokens}
    if not wanted.max_tokens or (own is not None and "max_tokens" not in wanted.model_fields_set):
        most = {}
    options = text_options(wanted, _OWN_OPTIONS, most, context.omni.info.thinks)
    options = bounded_options(options, service.settings, context.owner)
    check_lengths(options)
    context.wanted(bool(wanted.stream), False)
    if wanted.logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": wanted.logprobs}
    omni, echoed = context.omni, list[int]()
    if wanted.echo:
        echoed = omni.prompt_builder.raw(prompt, omni.info.context_length - 1).token_ids.tolist()
        most_new = options.pop("thinker_max_new_tokens", 0)
        stream = omni.stream_echo(echoed, most_new, **options)
    else:
        stream = omni.stream_continuation(prompt, **options)
    return Completion(wanted, stream, echoed, service, context)


def _prompt_of(wanted: CompletionRequest) -> str | list[int]:
    """Return a request's only prompt; the API checks token ids. Raises ApiError."""
    given: Any = wanted.prompt
    while isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, list) and any(isinstance(one, str) for one in given):
        raise wrong_value(
            f"prompt has {len(given)} texts or tokens, and one text is continued at a time. Send "
            "several requests.",
            "prompt",
        )
    return given


class Completion(Answer):
    """Continuation of one prompt."""

    def __init__(
        self,
        wanted: CompletionRequest,
        stream: SpeechStream,
        echoed: list[int],
        service: Service,
        context: Context,
    ):
        """echoed: the prompt's tokens if the text begins with them, else empty."""
        super().__init__(stream, service, context, bool(wanted.stream))
        self._options, self._id = wanted.stream_options, new_id("cmpl-")
        self._has_logprobs, self._echoed = wanted.logprobs is not None, echoed

    async def _next(self, events: Sequence[Event]) -> list[bytes]:
        text = self._take(events)
        return [self._piece(text)] if text else []

    def _piece(self, text: str, finish_reason: str | None = None) -> bytes:
        piece = self._frame(text, finish_reason)
        if self._options is not None and self._options.include_usage:
            continuous = self._options.continuous
            usage = running_usage(self._prompt_tokens, self._made) if continuous else None
            piece["usage"] = usage
        return json_event(piece)

    def _last(self) -> list[bytes]:
        pieces = [self._piece("", self._ended.thinker_finish_reason)]
        if self._options is not None and self._options.include_usage:
            pieces.append(json_event(self._frame() | {"usage": self._usage()}))
        return [*pieces, DONE]

    def whole(self) -> bytes:
        """Return the answer as one JSON object."""
        spell = self._context.omni.prompt_builder.token_bytes
        text, reason = "".join(self._texts), self._ended.thinker_finish_reason
        if self._echoed:  # also names of special tokens, which a reply's text lacks
            ids = [self._echoed[0], *self._ended.token_ids]
            ids = ids[:-1] if reason == "stop" else ids
            text = b"".join(map(spell, ids)).decode(errors="replace")
        answer = self._frame(text, reason)
        if self._has_logprobs:
            answer["choices"][0]["logprobs"] = text_logprobs(self._ended, self._echoed[:1], spell)
        return to_json(answer | {"usage": self._usage()})

    def _take(self, events: Sequence[Event]) -> str:
        before = len(self._texts)
        for event in events:
            if isinstance(event, TextDelta):
                self._texts.append(event.text)
                self._made += len(event.token_ids)
            elif isinstance(event, Finished):
                self._result = event.result
        return "".join(self._texts[before:])

    def _usage(self) -> Json:
        return completion_usage(self._ended.timings, max(0, len(self._echoed) - 1))

    def _frame(self, text: str | None = None, finish_reason: str | None = None) -> Json:
        """Return an object of this answer. text: None: without a choice."""
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return self._completion("text_completion", [] if text is None else [choice])
