"""Pieces of a long text that are spoken one by one, cut where speech pauses."""

import re
from collections.abc import Callable
from itertools import pairwise

# Where a text may be cut, the best places first: sentences and lines, clauses, words.
_CLOSING = "[\"'”’»)\\]」』）]*"
_PLACES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?:[.!?…]{_CLOSING}\s|[。！？]{_CLOSING}|\n)\s*",
        rf"(?:[,;:]{_CLOSING}\s|[—–]|[，、；：]{_CLOSING})\s*",
        r"\s+",
    )
)


def cut(text: str, most_tokens: int, count: Callable[[str], int]) -> list[str]:
    """Cut a text into pieces of at most `most_tokens` tokens, a longer word being one piece.

    A piece is as many sentences as fit. A longer sentence is cut where its clauses end, and a
    longer clause between words. count: counts the tokens of a text. Returns the pieces with the
    white space that follows each: joined they are the text.
    """
    return _cut(text, most_tokens, count, _PLACES)


def _cut(
    text: str, most_tokens: int, count: Callable[[str], int], places: tuple[re.Pattern[str], ...]
) -> list[str]:
    if not places or count(text) <= most_tokens:
        return [text]
    pieces: list[str] = []
    for part in _split(text, places[0]):
        if pieces and count(pieces[-1] + part) <= most_tokens:
            pieces[-1] += part
        else:
            pieces += _cut(part, most_tokens, count, places[1:])
    return pieces


def _split(text: str, place: re.Pattern[str]) -> list[str]:
    """Split a text behind each place where it may be cut."""
    ends = [0, *(match.end() for match in place.finditer(text)), len(text)]
    parts = (text[a:b] for a, b in pairwise(ends))
    return [part for part in parts if part]
