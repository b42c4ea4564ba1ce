"""Splitter of a reply's text into reasoning, content and tool calls, while it is generated."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qwen3_omni_neuron.runtime.tool_calls import CALL, END_OF_CALL, END_OF_THOUGHT, CompleteCall
from qwen3_omni_neuron.serving.openai.ids import new_id


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
    """Tool call. arguments: JSON text, or its beginning where the reply's limit has cut it off."""

    id: str
    name: str
    arguments: str
    complete: bool = True


ReplyPart = Reasoning | Content | Call
# A call that has come to its arguments: its name in JSON, and the rest of the text.
_BEGUN = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(\S.*)', re.DOTALL
)


class ReplyText:
    """Splitter of one reply. thinks: it begins with reasoning. takes_calls: it may call tools.

    reasons: whether the reasoning has not ended yet.
    """

    def __init__(self, thinks: bool, takes_calls: bool):
        self.reasons, self._takes_calls = thinks, takes_calls
        # In templates, blank lines separate the answer from reasoning and calls before it.
        self._strip, self._in_call = thinks or takes_calls, False
        self._held = ""

    def push(self, text: str) -> list[ReplyPart]:
        """Add text. Returns the parts that it completes. Raises ToolCallError; see CompleteCall."""
        self._held += text
        return self._split(last=False)

    def finish(self, *, at_limit: bool) -> list[ReplyPart]:
        """Return the remaining parts at the end of the reply. Raises ToolCallError, as push.

        at_limit: the reply has reached its limit. The last part is then the call that is cut off,
        if it has come to its arguments. A stop string in a call ends the reply before that call.
        """
        return self._split(last=True, tells_cut=at_limit)

    def _split(self, last: bool, tells_cut: bool = False) -> list[ReplyPart]:
        parts: list[ReplyPart] = []
        while True:
            if self._in_call:
                body, found, rest = self._held.partition(END_OF_CALL)
                if not found and not last:
                    return parts
                if not found:
                    self._held = ""
                    return [*parts, *_cut_call(body)] if tells_cut else parts
                self._held, self._in_call, self._strip = rest, False, True
                call = CompleteCall.parse(body)
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
                self.reasons, self._in_call = False, not self.reasons
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
    """Return the call that a reply's limit has cut off, in a list; none before its arguments.

    A client would take a call without arguments for one of a function that has none.
    """
    begun = _BEGUN.match(body)
    if begun is None:
        return []
    written = begun[2]
    try:
        name = json.loads(begun[1])
        f"{name}{written}".encode()  # JSON can encode lone surrogates, UTF-8 can't
    except ValueError:
        return []
    if written.startswith("{"):
        try:
            _, end = json.JSONDecoder().raw_decode(written)
        except (ValueError, RecursionError):
            pass
        else:
            written = written[:end]  # what is cut off is the end of the call around them
    return [Call(new_id("call_"), name, written, complete=False)]


def _begun(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may be the marker's beginning."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
