"""Strings that end a reply, found while its tokens are written."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # the tokenizer decodes an incomplete character to this
_MOST_INCOMPLETE = (
    3  # most INCOMPLETE at a text's end that may be one character, of 4 bytes at most
)

Decode = Callable[[list[int]], str]
Encode = Callable[[str], list[int]]


class StopStrings:
    """Watch for stop strings over the tokens of one reply.

    A token whose text may begin a stop string is held until later tokens decide, so that neither
    the caller nor the talker gets any part of a stop string.
    """

    def __init__(self, strings: Sequence[str], decode: Decode, encode: Encode):
        self._strings, self._decode, self._encode = tuple(strings), decode, encode
        self._held: list[int] = []

    @property
    def held(self) -> int:
        """Number of tokens that are held."""
        return len(self._held)

    def push(self, token_id: int) -> tuple[list[int], bool]:
        """Add a token. Returns the tokens that may be passed on, and whether the reply ends.

        Where a stop string begins inside a token, the text before it is tokenised anew.
        """
        self._held.append(token_id)
        text = self._decode(self._held)
        found = [at for at in map(text.find, self._strings) if at >= 0]
        if found:
            kept = text[: min(found)]
            whole = self._tokens_within(text, len(kept))
            passed = self._held[:whole]
            rest = kept[len(self._decode(passed)) :]
            self._held = []
            return passed + (self._encode(rest) if rest else []), True
        whole = self._tokens_within(text, len(text) - self._begun(text))
        passed, self._held = self._held[:whole], self._held[whole:]
        return passed, False

    def flush(self) -> list[int]:
        """Return the tokens that are still held: the reply has ended without a stop string."""
        passed, self._held = self._held, []
        return passed

    def _begun(self, text: str) -> int:
        """Return how many characters at the end of a text may begin a stop string.

        An incomplete character counts, because it may become any character.
        """
        incomplete = min(len(text) - len(text.rstrip(INCOMPLETE)), _MOST_INCOMPLETE)
        text = text[: len(text) - incomplete]
        longest = max(map(len, self._strings)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._strings):
                return length + incomplete
        return incomplete

    def _tokens_within(self, text: str, length: int) -> int:
        """Return how many of the held tokens spell no more than the first `length` characters."""
        for count in range(len(self._held), 0, -1):
            spelled = self._decode(self._held[:count])
            if len(spelled) <= length and text.startswith(spelled):
                return count
        return 0


class Marker:
    """Watch for one string of single-byte characters over the tokens of a text."""

    def __init__(self, string: str, decode: Decode):
        self._string, self._decode = string, decode
        self._tail: list[int] = []  # a token has at least one byte

    def push(self, token_id: int) -> str | None:
        """Add a token. Returns the text after the string once it was written, else None."""
        self._tail = [*self._tail, token_id][-len(self._string) :]
        _, found, rest = self._decode(self._tail).partition(self._string)
        return rest if found else None
