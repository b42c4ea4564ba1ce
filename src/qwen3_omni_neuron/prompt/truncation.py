"""Truncation: which messages a prompt keeps where a conversation does not fit."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Message = TypeVar("Message", bound=Mapping[str, Any])

REPLY_SHARE = 8  # at most 1/8 of the context stays free for the reply, as at OpenAI


@dataclass(frozen=True)
class ConversationPart:
    """Messages that are kept or dropped together: one from the user, or several of another role.

    begin, media_begin: indices of its first message, and of its first medium if it has media.
    tokens: its tokens in a prompt. calls, results: numbers of calls of tools and of their results.
    """

    role: str
    begin: int
    media_begin: int
    tokens: int
    calls: int = 0
    results: int = 0

    @staticmethod
    def of(
        messages: Sequence[Mapping[str, Any]], begin: int, media_begin: int, tokens: int
    ) -> "ConversationPart":
        """Return the part of some messages."""
        calls = sum(len(message.get("tool_calls", ())) for message in messages)
        results = sum(message["role"] == "tool" for message in messages)
        return ConversationPart(messages[0]["role"], begin, media_begin, tokens, calls, results)


@dataclass(frozen=True)
class Truncation:
    """Limits of a conversation whose oldest turns may be dropped.

    most_tokens: longest prompt. retained: fraction of the tokens after instructions and tools that
    remains when turns are dropped. after_instructions: most of these tokens, None: as many as
    most_tokens leaves.
    """

    most_tokens: int
    retained: float = 1.0
    after_instructions: int | None = None

    @staticmethod
    def of(option: str | Mapping[str, Any], context: int, reply_tokens: int) -> "Truncation | None":
        """Return the limits that an option asks for, None for "disabled".

        option: `RequestArguments.truncation`. context: positions of the KV cache. reply_tokens:
        most tokens of the reply, for which positions stay free.
        """
        if option == "disabled":
            return None
        most = context - min(reply_tokens, context // REPLY_SHARE)
        if isinstance(option, str):
            return Truncation(most)
        limits = option.get("token_limits") or {}
        return Truncation(most, option["retention_ratio"], limits.get("post_instructions"))

    @property
    def surely_fit(self) -> int:
        """Tokens of a whole conversation that is within every limit, whatever its parts are."""
        most = self.after_instructions
        return self.most_tokens if most is None else min(self.most_tokens, most)

    def first_kept(self, instructions: int, parts: Sequence[ConversationPart]) -> int:
        """Return the index of the first part that is kept.

        instructions: tokens of the system message and the tools. parts: the rest of the
        conversation; the last of them is to be answered. Turns are dropped up to the beginning of a
        user's turn, and never the last one. The earlier replies' prompts are cut first, as they
        were when the replies were made: so a growing conversation is cut at the same place until it
        is too long again, and its rows can be reused.
        """
        most = self.most_tokens - instructions
        if self.after_instructions is not None:
            most = min(most, self.after_instructions)
        starts = deque(_begins_of(parts))
        first = tokens = 0
        for end in range(len(parts) + 1):
            replies = end == len(parts) or parts[end].role == "assistant"
            if replies and tokens > most:
                while starts and starts[0] < end and tokens > self.retained * most:
                    start = starts.popleft()
                    tokens -= sum(part.tokens for part in parts[first:start])
                    first = start
            if end < len(parts):
                tokens += parts[end].tokens
        return first


def split(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the begin and end of each part of a conversation, whose first is its instructions.

    The first part is the system messages at the beginning, and empty if there are none.
    """
    roles = [message["role"] for message in messages]
    first = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    begins = [
        at
        for at in range(first, len(roles))
        if at == first or roles[at] == "user" or roles[at] != roles[at - 1]
    ]
    return list(zip([0, *begins], [*begins, len(roles)], strict=True))


def kept_messages(messages: Sequence[Message], begin: int) -> list[Message]:
    """Return a conversation's instructions, and its messages from the one with an index on."""
    (_, first), *_ = split(messages)
    return [*messages[:first], *messages[max(first, begin) :]]


def _begins_of(parts: Sequence[ConversationPart]) -> list[int]:
    """Return the user's turns that may begin what is kept: no result would lose its call."""
    found, open_results = [], 0
    for at in reversed(range(len(parts))):
        part = parts[at]
        open_results = max(0, open_results + part.results - part.calls)
        if part.role == "user" and not open_results:
            found.append(at)
    return found[::-1]
