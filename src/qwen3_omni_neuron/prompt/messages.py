"""A caller's messages -> checked messages for a chat template, and their media."""

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from qwen3_omni_neuron.errors import (
    AudioError,
    ImageError,
    InputError,
    MessageError,
    VideoError,
    format_value,
    printable,
)
from qwen3_omni_neuron.prompt.media.fields import FILES, ignore, read_fields, unknown_name
from qwen3_omni_neuron.prompt.pauses import pause

ROLES = ("system", "user", "assistant", "tool")
MEDIA_KINDS = ("audio", "image", "video")
# `name` and `tool_call_id` are not rendered: the model matches tool results to calls by order.
_FIELDS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(ROLES, ("role", "content", "name")),
    "assistant": ("role", "content", "tool_calls", "name"),
    "tool": ("role", "content", "tool_call_id", "name"),
}
_ERRORS: Mapping[str, type[InputError]] = {
    "audio": AudioError,
    "image": ImageError,
    "video": VideoError,
}
Messages = Sequence[Mapping[str, Any]]
Conversation = str | Messages
"""Messages, or the text of one user message."""
Media = TypeVar("Media")
Loader = Callable[[str, Mapping[str, Any], str], Media]
"""Function (kind, item, where) that reads a media item. where: name of the item in errors."""
Check = Callable[[str, str], None]
"""Function (text, where) that raises PromptTooLongError for too long a text."""
_MAX_DEPTH = 32
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can carry half of a surrogate pair; UTF-8 can't


def check_characters(text: str, where: str) -> None:
    """Raise MessageError for half of a surrogate pair, which UTF-8 can't encode."""
    if not text.isascii() and (half := _SURROGATE.search(text)):
        code = ord(half[0])
        escaped = 0xDC80 <= code <= 0xDCFF
        byte = f" (or the byte 0x{code & 0xFF:02X}, which is not UTF-8)" if escaped else ""
        raise MessageError(
            f"{where} has U+{code:04X} at character {half.start()} of its {len(text)}: half of a "
            f"UTF-16 surrogate pair{byte}, which is not a character. Remove it, or join pairs: "
            'text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").'
        )


def messages_of(conversation: Conversation) -> Messages:
    """Return the messages of a conversation. Raises MessageError for an empty text."""
    if not isinstance(conversation, str):
        return conversation
    if not conversation.strip():
        raise MessageError("the text to answer is empty: give at least one word.")
    return [{"role": "user", "content": conversation}]


def read_messages(
    messages: Conversation, reserved: Sequence[str], load: Loader[Media], check: Check = ignore
) -> tuple[list[dict[str, Any]], list[Media]]:
    """Check messages; return them for a chat template, and their media in order.

    Tool results are sorted by their calls. reserved: tokens that no text may contain. check: called
    with each text first. Raises MessageError, and the errors of `load` and `check`.
    """
    messages = messages_of(messages)
    if not _is_list(messages):
        kind = type(messages).__name__
        raise MessageError(
            f"messages is a {kind}; give a text, or a list such as "
            '[{"role": "user", "content": "Hello"}].'
        )
    if not messages:
        raise MessageError("the conversation is empty; it needs at least one user message.")
    reader = MessageReader(reserved, load, check)
    checked = []
    for i, message in enumerate(messages):
        pause()
        checked.append(reader.message(message, f"messages[{i}]"))
    if not any(message["role"] == "user" for message in checked):
        raise MessageError("the conversation has no user message; there is nothing to answer.")
    return _in_order_of_calls(checked, [m.get("tool_call_id") for m in messages]), reader.media


def check_last(messages: Conversation) -> None:
    """Raise MessageError if checked messages end with a blank turn of the user."""
    *before, last = messages_of(messages)
    greets = before and before[-1]["role"] == "system"  # an empty turn asks for a greeting
    if last["role"] == "user" and is_blank(last["content"]) and not greets:
        raise MessageError(f"messages[{len(before)}] is blank: give at least one word.")


def is_blank(content: str | Sequence[Mapping[str, Any]]) -> bool:
    """Return whether checked content has neither a word nor a medium."""
    if not isinstance(content, str):
        content = "".join(item.get("text", item["type"]) for item in content)
    return not content.strip()


def _in_order_of_calls(
    messages: Sequence[dict[str, Any]], ids: Sequence[Any]
) -> list[dict[str, Any]]:
    """Sort consecutive tool results by their calls; results without a call come last.

    ids: `tool_call_id` of each message.
    """
    turn, calls, at_of = 0, list[dict[str, Any]](), dict[str, int]()
    places = list[tuple[int, int]]()
    for message, call_id in zip(messages, ids, strict=True):
        if message["role"] == "tool":
            known = isinstance(call_id, str)
            places.append((turn, at_of.get(call_id, len(calls)) if known else len(calls)))
        else:
            turn, calls, at_of = turn + 1, message.get("tool_calls", []), {}
            for at, call in enumerate(calls):
                if isinstance(call.get("id"), str):
                    at_of.setdefault(call["id"], at)
            places.append((turn, -1))
    order = sorted(range(len(messages)), key=places.__getitem__)
    return [messages[at] for at in order]


def read_tools(
    tools: Sequence[Any], reserved: Sequence[str], check: Check = ignore
) -> list[dict[str, Any]]:
    """Check tool descriptions; return a copy for a chat template. Raises MessageError."""
    if not _is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise MessageError("tools must be a list of dicts that describe functions.")
    reader = MessageReader(reserved, _no_media, check)
    return [reader.plain(tool, "tool", f"tools[{i}]") for i, tool in enumerate(tools)]


def _no_media(kind: str, item: Mapping[str, Any], where: str) -> NoReturn:
    raise AssertionError("tools have no media")


class MessageReader:
    """Checker of messages, and collector of their media; see `read_messages`."""

    def __init__(self, reserved: Sequence[str], load: Loader[Any], check: Check = ignore):
        self._reserved, self._load, self._check = reserved, load, check
        self.media: list[Any] = []

    def message(self, message: Any, where: str) -> dict[str, Any]:
        """Check a message; return it for a chat template. where: its name in errors."""
        if not isinstance(message, Mapping):
            raise MessageError(f"{where} is a {type(message).__name__}, not a dict.")
        role = _name_in(ROLES, message.get("role"))
        if role is None:
            raise MessageError(
                f"{where} has role {format_value(message.get('role'))}; it must be one of "
                f"{', '.join(ROLES)}."
            )
        for name, value in message.items():
            if value is not None and name not in _FIELDS[role]:
                raise MessageError(f"{where} has {unknown_name(name, list(_FIELDS[role]))}")
        calls = message.get("tool_calls")
        if not calls:
            return {"role": role, "content": self.content(message.get("content"), role, where)}
        if not _is_list(calls) or not all(isinstance(call, Mapping) for call in calls):
            raise MessageError(f"{where} has tool_calls that are not a list of dicts.")
        return {
            "role": role,
            "content": self.content(message.get("content") or "", role, where),
            "tool_calls": [
                self.plain(call, role, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
            ],
        }

    def plain(self, value: Any, role: str, where: str, depth: int = 0) -> Any:
        """Return a copy of a JSON value, with every string checked."""
        if depth > _MAX_DEPTH:
            raise MessageError(f"{where} is nested deeper than {_MAX_DEPTH} lists or dicts.")
        if isinstance(value, str):
            return self._text(value, role, where)
        if isinstance(value, Mapping):
            return {
                self.plain(str(key), role, where, depth + 1): self.plain(
                    value[key], role, f"{where}.{printable(str(key), 40)}", depth + 1
                )
                for key in value
            }
        if _is_list(value):
            return [self.plain(v, role, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise MessageError(f"{where} is a {type(value).__name__}, which JSON can't represent.")

    def content(self, content: Any, role: str, where: str) -> str | list[dict[str, Any]]:
        """Check a message's content; return it for a chat template."""
        if isinstance(content, str):
            return self._text(content, role, where)
        if not _is_list(content):
            kind = type(content).__name__
            raise MessageError(
                f"{where} has content of type {kind}; give a string or a list of items."
            )
        return [self.item(x, role, f"{where}.content[{i}]") for i, x in enumerate(content)]

    def item(self, item: Any, role: str, where: str) -> dict[str, Any]:
        """Check one item of a message's content; return it for a chat template."""
        if not isinstance(item, Mapping):
            raise MessageError(f"{where} is a {type(item).__name__}, not a dict with a type.")
        kind = _name_in(("text", *MEDIA_KINDS), item.get("type"))
        if kind == "text":
            if not isinstance(item.get("text"), str):
                raise MessageError(f'{where} is text without a "text" string.')
            for name in item:
                if name not in ("type", "text"):
                    raise MessageError(f"{where} has {unknown_name(name, ['type', 'text'])}")
            return {"type": "text", "text": self._text(item["text"], role, where)}
        if kind is None:
            raise MessageError(
                f"{where} has type {format_value(item.get('type'))}; it must be one of text, "
                f"{', '.join(MEDIA_KINDS)}."
            )
        if role != "user":
            raise MessageError(f"{where} is {kind} of role {role}; only user messages may have it.")
        self.media.append(self._load(kind, _checked_item(kind, item, where), where))
        return {"type": kind}

    def _text(self, text: str, role: str, where: str) -> str:
        text = str.__str__(text)  # a subclass may compare and join differently
        self._check(text, where)
        for token in self._reserved:
            if token in text:
                raise MessageError(
                    f"{where} contains {token}, which stands for media in a prompt. Leave it out, "
                    "or spell it differently."
                )
        check_characters(text, f"{where} ({role})")
        return text


def _checked_item(kind: str, item: Mapping[str, Any], where: str) -> dict[str, Any]:
    def refusal(message: str, name: str | None) -> InputError:
        return _ERRORS[kind](message)

    given = {name: item[name] for name in item if name not in ("type", kind)}
    medium, sound = item.get(kind), item.get("audio")
    of_file = medium is None or isinstance(medium, FILES)
    made = read_fields(kind, given, where, refusal, of_file=of_file)
    if "sampling_rate" in made and isinstance(sound, FILES):
        raise _ERRORS[kind](
            f"{where} has a sampling_rate beside a sound file, which has its own. Leave it out."
        )
    return {"type": kind, kind: medium, **made}


def _is_list(value: object) -> bool:
    no_list = isinstance(value, str | bytes | bytearray | memoryview | Mapping)
    return isinstance(value, Sequence) and not no_list


def _name_in(names: Sequence[str], value: object) -> str | None:
    """Return the name that equals a str, also of a subclass or enum."""
    plain = str.__str__(value) if isinstance(value, str) else None
    return plain if plain in names else None


Message = TypeVar("Message", bound=Mapping[str, Any])

REPLY_SHARE = 8  # at most 1/8 of the context is reserved for the reply, as at OpenAI


@dataclass(frozen=True)
class ConversationPart:
    """Messages that are dropped together: one user message, or several of other roles.

    begin, media_begin: indices of its first message and media item. tokens: in a prompt. calls,
    results: numbers of tool calls and results.
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
        """Return the part that consists of `messages`."""
        calls = sum(len(message.get("tool_calls", ())) for message in messages)
        results = sum(message["role"] == "tool" for message in messages)
        return ConversationPart(messages[0]["role"], begin, media_begin, tokens, calls, results)


@dataclass(frozen=True)
class Truncation:
    """Limits of a conversation whose oldest turns may be dropped.

    most_tokens: longest prompt. retained: fraction of the tokens after the instructions that
    survives a cut. after_instructions: upper bound of these tokens, None: as many as fit.
    """

    most_tokens: int
    retained: float = 1.0
    after_instructions: int | None = None

    @staticmethod
    def of(option: str | Mapping[str, Any], context: int, reply_tokens: int) -> "Truncation | None":
        """Return the limits of an option, None for "disabled".

        option: `RequestArguments.truncation`. context: positions of the KV cache. reply_tokens:
        upper bound of the reply, for which positions stay free.
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
        """Number of tokens that exceeds no limit, however it is divided."""
        most = self.after_instructions
        return self.most_tokens if most is None else min(self.most_tokens, most)

    def first_kept(self, instructions: int, parts: Sequence[ConversationPart]) -> int:
        """Return the index of the first part that remains.

        instructions: tokens of the system message and the tools. Cuts are before a user's turn, and
        never drop the last one. Earlier replies' prompts are cut first, as they were then, so that
        a growing conversation keeps its cut, and reuses its KV rows, until it is too long again.
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
    """Return the begin and end of each part; the first includes the leading system messages."""
    roles = [message["role"] for message in messages]
    first = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    begins = [
        at
        for at in range(first, len(roles))
        if at == first or roles[at] == "user" or roles[at] != roles[at - 1]
    ]
    return list(zip([0, *begins], [*begins, len(roles)], strict=True))


def kept_messages(messages: Sequence[Message], begin: int) -> list[Message]:
    """Return a conversation's instructions, and its messages from index `begin` on."""
    (_, first), *_ = split(messages)
    return [*messages[:first], *messages[max(first, begin) :]]


def _begins_of(parts: Sequence[ConversationPart]) -> list[int]:
    """Return the user turns at which a cut separates no result from its call."""
    found, open_results = [], 0
    for at in reversed(range(len(parts))):
        part = parts[at]
        open_results = max(0, open_results + part.results - part.calls)
        if part.role == "user" and not open_results:
            found.append(at)
    return found[::-1]
