"""Long text -> pieces to speak one by one, cut where speech pauses."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

# Places to cut, best first: sentences and lines, clauses, words.
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
    """Cut a text into pieces of at most `most_tokens` tokens; a longer word is one piece.

    A piece has as many sentences as fit, else clauses, else words. count: counts tokens.
    """

    def fits(piece: str) -> bool:
        return count(piece) <= most_tokens

    return [text] if fits(text) else _cut(text, fits, _PLACES)


def _cut(text: str, fits: Callable[[str], bool], places: Sequence[re.Pattern[str]]) -> list[str]:
    if not places:
        return [text]
    parts = _split(text, places[0])
    if len(parts) == 1:
        return _cut(text, fits, places[1:])
    pieces: list[str] = []
    begun, at, taken = "", 0, 1
    while at < len(parts):
        end = _last_end(parts, at, begun, at + taken, fits)
        if end > at or begun:
            pieces.append(begun + "".join(parts[at:end]))
            begun, taken = "", max(1, end - at)
        else:
            *whole, begun = _cut(parts[at], fits, places[1:])
            pieces += whole
            end += 1
        at = end
    return [*pieces, begun] if begun else pieces


def _last_end(
    parts: Sequence[str], at: int, begun: str, guess: int, fits: Callable[[str], bool]
) -> int:
    """Return the largest end such that parts[at:end] fit after `begun`.

    Searches around `guess`: trying each end takes quadratic time.
    """
    low, high, step = at, len(parts) + 1, 1  # low fits; high, or an end below it, does not
    guess = min(guess, len(parts))
    while high - low > 1:
        if fits(begun + "".join(parts[at:guess])):
            low, guess = guess, guess + step
        else:
            high, guess = guess, guess - step
        step *= 2
        if not low < guess < high:
            guess = (low + high) // 2
    return low


def _split(text: str, place: re.Pattern[str]) -> list[str]:
    ends = [0, *(match.end() for match in place.finditer(text)), len(text)]
    parts = (text[a:b] for a, b in pairwise(ends))
    return [part for part in parts if part]
