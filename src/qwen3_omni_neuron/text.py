"""Token ids to text, piece by piece, without ever cutting a character."""

from collections.abc import Callable

_INCOMPLETE = "\ufffd"


class TextStream:
    """Decodes a growing reply. A character that several tokens spell comes out whole.

    decode: token ids -> text, special tokens skipped.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._held: list[int] = []

    def push(self, token_id: int) -> tuple[str, list[int]]:
        """Text that is complete with this token, and the ids it came from; both may be empty."""
        self._held.append(token_id)
        text = self._decode(self._held)
        if text.endswith(_INCOMPLETE):
            return "", []
        return self._release(text)

    def finish(self) -> tuple[str, list[int]]:
        """What is still held, as far as it can be decoded."""
        return self._release(self._decode(self._held)) if self._held else ("", [])

    def _release(self, text: str) -> tuple[str, list[int]]:
        ids, self._held = self._held, []
        return text, ids
