"""Text of messages in which the names of special tokens are plain words.

A prompt is one text, in which `<|im_end|>` ends a turn. If a message's own text had that name, it
would end the turn, too: the author of one message could then write all of them.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from unicodedata import is_normalized

from qwen3_omni_neuron.prompt.messages import MEDIA_KINDS
from qwen3_omni_neuron.prompt.tokenizer import Tokenizer

ITEM_TYPES = ("text", *MEDIA_KINDS, "function")


class SpecialNames:
    """Names of a tokenizer's special tokens, with the patterns that find them in texts.

    any, ids: pattern of all names, and the token ids of each. marked: pattern of the names that are
    words in a caller's text. heads, tails: beginnings and ends of these names; a text that ends
    with a head or begins with a tail may form a name when it is joined to another text.
    """

    def __init__(self, tokenizer: Tokenizer, marked: Collection[str] | None = None):
        """marked: the names that are words in a text; None: all names."""
        self.tokenizer = tokenizer
        # Longer names first: if two match at one place, the longer one is the token.
        found = (name for name in tokenizer.added_tokens if len(name) > 1)
        names = sorted(found, key=len, reverse=True)
        self.any, self.ids = _any_of(names), {name: tokenizer.encode(name) for name in names}
        names = [name for name in names if marked is None or name in marked]
        self.marked = _any_of(names)
        self.heads = tuple({name[:n] for name in names for n in range(1, len(name))})
        self.tails = tuple({name[-n:] for name in names for n in range(1, len(name))})


class LiteralText:
    """Marker of the special tokens' names in the texts of one conversation.

    `mark` puts a separator, which nobody can guess, into each name in a text, and where a name may
    begin or end at the text's edge, since a template may join texts. `encode` splits the prompt at
    the remaining names, which are the template's own, and tokenises the text between them as words,
    without the separators. Most texts need no separator.
    """

    def __init__(self, names: SpecialNames):
        self._names = names
        self._drawn: str | None = None

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages for a chat template, with all of the caller's texts marked."""
        return [
            {name: value if name == "role" else self._mark_all(value) for name, value in m.items()}
            for m in messages
        ]

    def mark(self, text: str) -> str:
        """Return a caller's text with separators in its names of special tokens."""
        marked = text
        while self._names.marked.search(marked):
            marked = self._names.marked.sub(lambda name: self._separated(name[0]), marked)
        if text.startswith(self._names.tails):
            marked = self._separator + marked
        if text.endswith(self._names.heads):
            marked += self._separator
        return marked

    def unmarked(self, prompt: str) -> str:
        """Return a prompt without the separators."""
        return prompt if self._drawn is None else prompt.replace(self._drawn, "")

    def encode(self, prompt: str, most: int | None = None) -> list[int]:
        """Return the token ids of a prompt that the chat template made of marked texts.

        most: see `Tokenizer.encode`.
        """
        tokenizer, ids = self._names.tokenizer, self._names.ids
        # All names are the template's own, and normalisation of the text makes no new ones.
        if self._drawn is None and is_normalized("NFC", prompt):
            return tokenizer.encode(prompt, most)
        token_ids: list[int] = []
        for words, name in _pieces(self._names.any, prompt):
            if words:
                token_ids += tokenizer.encode_words(self.unmarked(words), most)
            token_ids += ids.get(name, ())
            if most is not None and len(token_ids) > most:
                break
        return token_ids

    def _mark_all(self, value: Any) -> Any:
        """Return a copy of a JSON value with every string marked, except types of items."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
            return {
                self.mark(key): one if key == "type" and one in ITEM_TYPES else self._mark_all(one)
                for key, one in value.items()
            }
        if isinstance(value, Sequence):
            return [self._mark_all(one) for one in value]
        return value

    @property
    def _separator(self) -> str:
        if self._drawn is None:
            self._drawn = f"[{secrets.token_hex(16)}]"
        return self._drawn

    def _separated(self, name: str) -> str:
        return name[:1] + self._separator + name[1:]


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)))


def _pieces(names: re.Pattern[str], text: str) -> Sequence[tuple[str, str]]:
    """Return pairs of the words before a name, and the name; the last pair's name is empty."""
    found, at = [], 0
    for match in names.finditer(text):
        found.append((text[at : match.start()], match[0]))
        at = match.end()
    return [*found, (text[at:], "")]
