"""Messages of a caller -> checked messages for a chat template, and their media."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from qwen3_omni_neuron.errors import MessageError

ROLES = ("system", "user", "assistant")
MEDIA_KINDS = ("audio", "image", "video")
Messages = Sequence[Mapping[str, Any]]
Media = TypeVar("Media")
Loader = Callable[[str, Mapping[str, Any], str], Media]
"""Function (kind, item, where) that reads a media item. where: names the item in errors."""


def read_messages(
    messages: Messages, reserved: Sequence[str], load: Loader[Media]
) -> tuple[list[dict[str, Any]], list[Media]]:
    """Check messages; return them for a chat template, and their media in order.

    reserved: tokens that stand for media in a prompt, which no text may contain.
    Raises MessageError, which names the message or item at fault, and the errors of `load`.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise MessageError(
            f'messages is a {kind}; give a list such as [{{"role": "user", "content": "Hello"}}].'
        )
    if not messages:
        raise MessageError("the conversation is empty; it needs at least one user message.")
    reader = _Reader(reserved, load)
    checked = [reader.message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    if not any(message["role"] == "user" for message in checked):
        raise MessageError("the conversation has no user message; there is nothing to answer.")
    return checked, reader.media


class _Reader:
    """Checker of messages, which collects their media."""

    def __init__(self, reserved: Sequence[str], load: Loader[Any]):
        self._reserved, self._load = reserved, load
        self.media: list[Any] = []

    def message(self, message: Any, where: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise MessageError(f"{where} is a {type(message).__name__}, not a dict.")
        role = message.get("role")
        if role not in ROLES:
            raise MessageError(f"{where} has role {role!r}; it is one of {', '.join(ROLES)}.")
        return {"role": role, "content": self._content(message.get("content"), role, where)}

    def _content(self, content: Any, role: str, where: str) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return self._text(content, where)
        if isinstance(content, Mapping) or not isinstance(content, Sequence):
            kind = type(content).__name__
            raise MessageError(
                f"{where} has content of type {kind}; give a string or a list of items."
            )
        return [self._item(x, role, f"{where}.content[{i}]") for i, x in enumerate(content)]

    def _item(self, item: Any, role: str, where: str) -> dict[str, Any]:
        if not isinstance(item, Mapping):
            raise MessageError(f"{where} is a {type(item).__name__}, not a dict with a type.")
        kind = item.get("type")
        if kind == "text":
            if not isinstance(item.get("text"), str):
                raise MessageError(f'{where} is text without a "text" string.')
            return {"type": "text", "text": self._text(item["text"], where)}
        if kind not in MEDIA_KINDS:
            raise MessageError(
                f"{where} has type {kind!r}; text, {', '.join(MEDIA_KINDS)} are understood."
            )
        if role != "user":
            raise MessageError(f"{where} is {kind} of role {role}; only user messages may hold it.")
        self.media.append(self._load(kind, item, where))
        return {"type": kind}

    def _text(self, text: str, where: str) -> str:
        for token in self._reserved:
            if token in text:
                raise MessageError(
                    f"{where} contains {token}, which stands for media in a prompt. Leave it out, "
                    "or spell it differently."
                )
        return text
