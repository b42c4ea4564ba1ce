"""Strings that end a reply, found while its tokens are written."""

from collections.abc import Callable, Sequence
from typing import Protocol

INCOMPLETE = "\ufffd"  # the tokenizer decodes an incomplete character to this
_MOST_INCOMPLETE = 3  # so many INCOMPLETE may be one character, which has 4 bytes at most
# Most tokens that are held: the longest stop string has so many bytes, but between its characters a
# reply may have any number of special tokens without text.
MOST_HELD = 1024

Decode = Callable[[list[int]], str]
Encode = Callable[[str], list[int]]


class TextCodec(Protocol):
    """The tokenizer, as the runtime uses it."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of generated tokens, without special tokens."""
        ...

    def encode_words(self, text: str) -> list[int]:
        """Return the token ids of a text, in which names of special tokens are words."""
        ...


class StopStrings:
    """Watch for stop strings over the tokens of one reply.

    A token whose text may begin a stop string is held until later tokens decide, so that neither
    the caller nor the talker gets any part of a stop string.
    """

    def __init__(self, strings: Sequence[str], decode: Decode, encode: Encode):
        self._strings, self._decode, self._encode = tuple(strings), decode, encode
        self._held: list[int] = []
        self._texts: list[str] = []  # number i: text of the first i + 1 held tokens

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
        self._texts.append(text)
        # An incomplete character is no U+FFFD: it may become any character.
        whole = len(text) - min(len(text) - len(text.rstrip(INCOMPLETE)), _MOST_INCOMPLETE)
        found = [at for s in self._strings if (at := text.find(s, 0, whole)) >= 0]
        if found:
            passed, spelled = self._pass_on(min(found))
            rest = text[spelled : min(found)]
            self.flush()
            return passed + (self._encode(rest) if rest else []), True
        if len(self._held) > MOST_HELD:
            return self.flush(), False
        return self._pass_on(whole - self._begun(text[:whole]))[0], False

    def flush(self) -> list[int]:
        """Return the tokens that are still held: the reply has ended without a stop string."""
        passed, self._held, self._texts = self._held, [], []
        return passed

    def _begun(self, text: str) -> int:
        """Return how many characters at the end of a text may begin a stop string."""
        longest = max(map(len, self._strings)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0

    def _pass_on(self, length: int) -> tuple[list[int], int]:
        """Hold no longer the tokens that spell at most the first `length` characters.

        Returns them, and the number of characters that they spell.
        """
        text = self._texts[-1]
        for count in range(len(self._held), 0, -1):
            spelled = self._texts[count - 1]
            if len(spelled) <= length and text.startswith(spelled):
                passed, self._held = self._held[:count], self._held[count:]
                self._texts = [later[len(spelled) :] for later in self._texts[count:]]
                return passed, len(spelled)
        return [], 0


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
