"""Messages of a caller -> checked messages for a chat template, and their media."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from qwen3_omni_neuron.errors import MessageError, format_value

ROLES = ("system", "user", "assistant")
MEDIA_KINDS = ("audio", "image", "video")
Messages = Sequence[Mapping[str, Any]]
Media = TypeVar("Media")
Loader = Callable[[str, Mapping[str, Any], str], Media]
"""Function (kind, item, where) that reads a media item. where: names the item in errors."""
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can carry half of a pair; UTF-8 can't


def read_messages(
    messages: Messages, reserved: Sequence[str], load: Loader[Media]
) -> tuple[list[dict[str, Any]], list[Media]]:
    """Check messages; return them for a chat template, and their media in order.

    reserved: tokens that stand for media in a prompt, which no text may contain.
    Raises MessageError, which names the message or item at fault, and the errors of `load`.
    """
    if not _is_list(messages):
        kind = type(messages).__name__
        raise MessageError(
            f'messages is a {kind}; give a list such as [{{"role": "user", "content": "Hello"}}].'
        )
    if not messages:
        raise MessageError("the conversation is empty; it needs at least one user message.")
    reader = MessageReader(reserved, load)
    checked = [reader.message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    if not any(message["role"] == "user" for message in checked):
        raise MessageError("the conversation has no user message; there is nothing to answer.")
    return checked, reader.media


class MessageReader:
    """Checker of messages one by one, which collects their media in order.

    reserved, load: as `read_messages` has them.
    """

    def __init__(self, reserved: Sequence[str], load: Loader[Any]):
        self._reserved, self._load = reserved, load
        self.media: list[Any] = []

    def message(self, message: Any, where: str) -> dict[str, Any]:
        """Check a message; return it for a chat template. where: names it in errors."""
        if not isinstance(message, Mapping):
            raise MessageError(f"{where} is a {type(message).__name__}, not a dict.")
        role = _name_in(ROLES, message.get("role"))
        if role is None:
            raise MessageError(
                f"{where} has role {format_value(message.get('role'))}; it is one of "
                f"{', '.join(ROLES)}."
            )
        return {"role": role, "content": self.content(message.get("content"), role, where)}

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
            return {"type": "text", "text": self._text(item["text"], role, where)}
        if kind is None:
            raise MessageError(
                f"{where} has type {format_value(item.get('type'))}; it is one of text, "
                f"{', '.join(MEDIA_KINDS)}."
            )
        if role != "user":
            raise MessageError(f"{where} is {kind} of role {role}; only user messages may hold it.")
        self.media.append(self._load(kind, item, where))
        return {"type": kind}

    def _text(self, text: str, role: str, where: str) -> str:
        text = str.__str__(text)  # a subclass may compare and join in a way of its own
        for token in self._reserved:
            if token in text:
                raise MessageError(
                    f"{where} contains {token}, which stands for media in a prompt. Leave it out, "
                    "or spell it differently."
                )
        if half := _SURROGATE.search(text):
            raise MessageError(
                f"{where} ({role}) has U+{ord(half[0]):04X} at character {half.start()} of its "
                f"{len(text)}: half of a UTF-16 surrogate pair, which is no character. Remove it, "
                'or join pairs: text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").'
            )
        return text


def _is_list(value: object) -> bool:
    """Return whether a value is a list or the like of it, and neither text nor bytes."""
    no_list = isinstance(value, str | bytes | bytearray | memoryview | Mapping)
    return isinstance(value, Sequence) and not no_list


def _name_in(names: Sequence[str], value: object) -> str | None:
    """Return the one of `names` that a value equals, be it a str, a subclass, or an enum of str."""
    plain = str.__str__(value) if isinstance(value, str) else None
    return plain if plain in names else None
