"""Parts of an answer: ids, kinds of text, log-probabilities, usage.

Audio tokens are the prompt's sound tokens, and the frames of the reply's speech.
"""

import itertools
import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from qwen3_omni_neuron.events import SpeechResult, TextDelta, Timings
from qwen3_omni_neuron.runtime.stop_strings import CALL, END_OF_THOUGHT, CallText, CompleteCall

Json = dict[str, Any]
_KEY = secrets.token_bytes(32)
_numbers = itertools.count()
PUBLIC_ID_BYTES = 16
"""Bytes of an id that alone authorises a client if nobody has a key."""


def new_id(prefix: str, size: int = 12) -> str:
    """Return an unguessable id with a digest of `size` bytes. Thread-safe.

    Reading the system's random bytes would release the GIL, for which the event loop would wait.
    """
    number = next(_numbers).to_bytes(8, "little")
    return prefix + blake2b(number, digest_size=size, key=_KEY).hexdigest()


@dataclass(frozen=True)
class Reasoning:
    """Next part of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class Content:
    """Next part of the answer. logprobs: of its tokens, in the form of chat completions."""

    text: str
    logprobs: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Call:
    """Tool call. arguments: JSON text, truncated at the reply's limit."""

    id: str
    name: str
    arguments: str
    complete: bool = True


ReplyPart = Reasoning | Content | Call
# A call up to its arguments: name in JSON, and the remaining text.
_BEGUN = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(\S.*)', re.DOTALL
)


class ReplyText:
    """Splitter of one reply. thinks: it begins with reasoning. takes_calls: it may call tools.

    reasons: the reasoning has not ended.
    """

    def __init__(self, thinks: bool, takes_calls: bool):
        self.reasons, self._takes_calls = thinks, takes_calls
        # Templates put blank lines between reasoning or calls and the answer.
        self._strip = thinks or takes_calls
        self._call: CallText | None = None  # the reply is in a call
        self._held = ""

    def push(self, text: str) -> list[ReplyPart]:
        """Add text. Returns the parts that it completes. Raises ToolCallError; see CompleteCall."""
        self._held += text
        return self._split(last=False)

    def finish(self, *, at_limit: bool) -> list[ReplyPart]:
        """Return the remaining parts at the reply's end. Raises ToolCallError.

        at_limit: the reply reached its limit; its last part may be a call with truncated arguments.
        A stop string in a call ends the reply before it.
        """
        return self._split(last=True, tells_cut=at_limit)

    def _split(self, last: bool, tells_cut: bool = False) -> list[ReplyPart]:
        parts: list[ReplyPart] = []
        while True:
            if self._call is not None:
                body, rest = self._call, self._call.push(self._held)
                self._held = ""
                if rest is None:
                    return [*parts, *_cut_call(body.text)] if last and tells_cut else parts
                self._held, self._call, self._strip = rest, None, True
                call = CompleteCall.parse(body.text)
                parts.append(Call(new_id("call_"), call.name, call.arguments))
                continue
            marker = END_OF_THOUGHT if self.reasons else CALL
            if not self.reasons and not self._takes_calls:
                self._put(parts, self._held)
                self._held = ""
                return parts
            text, found, rest = self._held.partition(marker)
            if found:
                self._put(parts, text)
                self._held = rest
                self._call = None if self.reasons else CallText()
                self.reasons = False
                continue
            kept = 0 if last else _begun(text, marker)
            self._put(parts, text[: len(text) - kept])
            self._held = text[len(text) - kept :]
            return parts

    def _put(self, parts: list[ReplyPart], text: str) -> None:
        if self.reasons:
            if text:
                parts.append(Reasoning(text))
            return
        text = text.lstrip("\n") if self._strip else text
        if text:
            self._strip = False
            parts.append(Content(text))


def _cut_call(body: str) -> list[Call]:
    """Return a call truncated by a limit, in a list; none before its arguments.

    Clients would treat a call without arguments as complete.
    """
    begun = _BEGUN.match(body)
    if begun is None:
        return []
    written = begun[2]
    try:
        name = json.loads(begun[1])
        f"{name}{written}".encode()  # fails for lone surrogates, which JSON can encode
    except ValueError:
        return []
    if written.startswith("{"):
        try:
            _, end = json.JSONDecoder().raw_decode(written)
        except (ValueError, RecursionError):
            pass
        else:
            written = written[:end]  # the cut is in the end of the surrounding call
    return [Call(new_id("call_"), name, written, complete=False)]


def _begun(text: str, marker: str) -> int:
    """Count the characters at a text's end that may begin the marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)


def chat_usage(timings: Timings, reasoning_tokens: int) -> Json:
    """Return the usage of a chat completion."""
    made = timings.text_tokens + timings.frames
    return {
        **running_usage(timings.prompt_tokens, made),
        "prompt_tokens_details": _prompt_details(timings),
        "completion_tokens_details": {
            **_reply_details(timings),
            "reasoning_tokens": reasoning_tokens,
        },
    }


def running_usage(prompt_tokens: int, made: int) -> Json:
    """Return an answer's usage so far. made: its tokens and frames."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
    }


def completion_usage(timings: Timings, echoed: int = 0) -> Json:
    """Return a raw prompt's usage. echoed: the prompt's tokens in the reply."""
    usage = running_usage(timings.prompt_tokens + echoed, timings.text_tokens - echoed)
    return usage | {"prompt_tokens_details": {"cached_tokens": timings.reused_tokens}}


def response_usage(timings: Timings, reasoning_tokens: int) -> Json:
    """Return the usage of a response."""
    made = timings.text_tokens + timings.frames
    return {
        "input_tokens": timings.prompt_tokens,
        "input_tokens_details": {**_prompt_details(timings), "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {**_reply_details(timings), "reasoning_tokens": reasoning_tokens},
        "total_tokens": timings.prompt_tokens + made,
    }


def realtime_usage(timings: Timings) -> Json:
    """Return the usage of a realtime response."""
    made = timings.text_tokens + timings.frames
    return {
        "total_tokens": timings.prompt_tokens + made,
        "input_tokens": timings.prompt_tokens,
        "output_tokens": made,
        "input_token_details": _prompt_details(timings),
        "output_token_details": _reply_details(timings),
    }


def speech_usage(timings: Timings) -> Json:
    """Return the usage of a spoken text."""
    return {
        "input_tokens": timings.text_tokens,
        "output_tokens": timings.frames,
        "total_tokens": timings.text_tokens + timings.frames,
    }


def transcription_usage(windows: Sequence[Timings]) -> Json:
    """Return the usage of a transcription. windows: timings of its requests."""
    prompt = sum(timings.prompt_tokens for timings in windows)
    audio = sum(timings.prompt_audio_tokens for timings in windows)
    text = sum(timings.text_tokens for timings in windows)
    return {
        "type": "tokens",
        "input_tokens": prompt,
        "output_tokens": text,
        "total_tokens": prompt + text,
        "input_token_details": {"audio_tokens": audio, "text_tokens": prompt - audio},
    }


def duration_usage(seconds: float) -> Json:
    """Return the usage of a transcription billed by duration."""
    return {"type": "duration", "seconds": seconds}


def logprob_entries(delta: TextDelta) -> list[Json]:
    """Return the log-probability of a transcript's part, in a list; none without text.

    Tokens that together spell a character are one entry, with summed log-probabilities.
    """
    if not delta.text or not delta.logprobs:
        return []
    spelled = list(delta.text.encode())
    return [{"token": delta.text, "bytes": spelled, "logprob": sum(delta.logprobs)}]


def token_logprobs(delta: TextDelta, spell: Callable[[int], bytes]) -> list[Json]:
    """Return the log-probabilities of a delta's tokens, in the form of chat completions.

    spell: returns a token's bytes, or None if it is not text.
    """
    if not delta.text:
        return []
    likeliest = delta.top_logprobs or [[]] * len(delta.logprobs)
    return [
        _token_logprob(token_id, logprob, spell)
        | {"top_logprobs": [_token_logprob(*other, spell) for other in others]}
        for token_id, logprob, others in zip(
            delta.token_ids, delta.logprobs, likeliest, strict=True
        )
    ]


def text_logprobs(
    result: SpeechResult, first: Sequence[int], spell: Callable[[int], bytes]
) -> Json:
    """Return the log-probabilities of a completion's tokens. first: earlier tokens without any."""
    token_ids = [*first, *result.token_ids]
    told = zip(token_ids[len(first) :], result.logprobs, result.top_logprobs, strict=True)
    entries = [
        (_token_logprob(token_id, logprob, spell), [_token_logprob(*one, spell) for one in others])
        for token_id, logprob, others in told
    ]
    tokens = [spell(token_id).decode(errors="replace") for token_id in token_ids]
    none = [None] * len(first)
    return {
        "tokens": tokens,
        "token_logprobs": [*none, *(own["logprob"] for own, _ in entries)],
        "top_logprobs": [
            *none,
            *({one["token"]: one["logprob"] for one in [own, *others]} for own, others in entries),
        ],
        "text_offset": [0, *itertools.accumulate(map(len, tokens[:-1]))],
    }


def _token_logprob(token_id: int, logprob: float, spell: Callable[[int], bytes]) -> Json:
    spelled = spell(token_id)
    text = spelled.decode(errors="replace")
    # OpenAI writes -9999.0 for -infinity, which JSON lacks.
    return {"token": text, "bytes": list(spelled), "logprob": max(logprob, -9999.0)}


def _prompt_details(timings: Timings) -> Json:
    media = timings.prompt_audio_tokens + timings.prompt_image_tokens
    return {
        "text_tokens": timings.prompt_tokens - media,
        "audio_tokens": timings.prompt_audio_tokens,
        "image_tokens": timings.prompt_image_tokens,
        "cached_tokens": timings.reused_tokens,
    }


def _reply_details(timings: Timings) -> Json:
    return {"text_tokens": timings.text_tokens, "audio_tokens": timings.frames}
