"""Completion of a reply in its grammar near the reply's limit."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEAR_TOKENS = 256  # tokens before the limit from which a completion is known
MARGIN_TOKENS = 8  # tokens by which one token may lengthen the completion, at first
MOST_CHOICES = 64  # tokens of a completion that the grammar does not force
ATTEMPTS = 3
FEW_TOKENS = 32  # tried one by one
_QUOTES, _BRACKETS = '"', ")]}>"
_SIGNS, _ENDS = ",:|&+*/=", ".!?;'`\u010a"  # \u010a: a line feed in the vocabulary
_SHORT = ("0", "1", "null", "true")
_LETTERS = ("a", "x", "z")  # if allowed, a string is open; not letters of true and null
Mask = NDArray[np.uint32]


class Closer:
    """Tracker of the shortest known tokens that complete one reply.

    closed: the limit has excluded tokens that the grammar allows.
    """

    def __init__(self, vocabulary: Mapping[str, int]):
        """vocabulary: token ids by their bytes as byte-level tokenizers write them."""
        texts = sorted(vocabulary, key=len, reverse=True)

        def of(first: str) -> list[str]:
            closing = frozenset(first if first == _SIGNS else _QUOTES + _BRACKETS + _ENDS)
            return [text for text in texts if text[0] in first and closing >= {*text}]

        def ids(found: Sequence[str]) -> NDArray[np.int64]:
            return np.array([vocabulary[text] for text in found], np.int64)

        quotes, brackets, signs, ends = map(of, (_QUOTES, _BRACKETS, _SIGNS, _ENDS))
        short, letters = ([t for t in names if t in vocabulary] for names in (_SHORT, _LETTERS))
        self._all, self._lengths = ids(texts), np.array(list(map(len, texts)))
        self._letters, self._in_text = ids(letters), ids(quotes + ends + brackets)
        self._between = ids(brackets + signs + short + quotes + ends)
        self.begin()

    def begin(self) -> None:
        """Begin a new reply."""
        self.closed = False
        self._way: list[int] | None = None
        self._rise = self._failed = 0
        self._draw = random.Random(0)

    def narrow(
        self, matcher: Any, tokens: Sequence[int], left: int, mask: Mask, ends: Mask
    ) -> None:
        """Mask tokens after which the reply could not be complete at its limit.

        matcher: llguidance's, after `tokens`. left: number of tokens up to the limit. ends: bits
        of the tokens that end the reply.
        """
        if not 0 < left <= NEAR_TOKENS or self._failed >= ATTEMPTS:
            return
        way = self._way
        if way is None or not (way[:1] == [*tokens] or _completes(matcher, way)):
            found = self._found(matcher, left, ends)
            if way is not None and found is not None:
                self._rise = max(self._rise, len(found) - len(way))
            self._failed += found is None
            self._way = found
        elif way and way[:1] == [*tokens]:
            self._way = way[1:]
        way = self._way
        # A complete reply may continue to its limit unless that was seen to open something.
        margin = max(self._rise, MARGIN_TOKENS if way else 0)
        if way is None or left > len(way) + 2 * MARGIN_TOKENS + self._rise:
            return
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = bits.nonzero()[0]
        if len(allowed) <= FEW_TOKENS:
            fit: list[int] = [
                token for token in allowed.tolist() if self._fits(matcher, token, left, ends)
            ]
        elif left <= len(way) + margin and self._runs_over(matcher, left, ends):
            fit = way[:1]
        else:
            return
        if len(fit) < len(allowed) and (fit or not way):
            self.closed = True
            mask[:] = 0 if fit else ends
            for token in fit:
                mask[token // 32] |= np.uint32(1 << token % 32)

    def _fits(self, matcher: Any, token: int, left: int, ends: Mask) -> bool:
        if _has(ends, np.array([token]))[0]:
            return True
        copy = matcher.deep_copy()
        return copy.consume_tokens([token]) and self._found(copy, left - 1, ends) is not None

    def _runs_over(self, matcher: Any, left: int, ends: Mask) -> bool:
        walks = (self._walk(matcher, left, ends, closes=False)[0] for _ in range(ATTEMPTS))
        return any(len(way) > left for way in walks)

    def _found(self, matcher: Any, most: int, ends: Mask) -> list[int] | None:
        """Return a short completion of at most `most` tokens, or None."""
        walks = (self._walk(matcher, most, ends, closes=True) for _ in range(ATTEMPTS))
        return next((way for way, whole in walks if whole), None)

    def _walk(self, matcher: Any, most: int, ends: Mask, closes: bool) -> tuple[list[int], bool]:
        """Return a continuation up to the reply's end or limit, and whether it is complete then.

        closes: prefer tokens that close something.
        """
        copy, way, mask = matcher.deep_copy(), list[int](), np.zeros_like(ends)
        for _ in range(MOST_CHOICES):
            if copy.is_stopped() or (closes and copy.is_accepting()):
                return way, True
            tokens = copy.compute_ff_tokens()
            if not tokens:
                copy.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                tokens = self._choice(mask & ~ends, closes)
            way += tokens
            if not tokens or len(way) > most or not copy.consume_tokens(tokens):
                break
        return way, False

    def _choice(self, mask: Mask, closes: bool) -> list[int]:
        """Return an allowed token in a list: one that closes something, or any."""
        closing = self._in_text if _has(mask, self._letters).any() else self._between
        found = closing[_has(mask, closing)][:1] if closes else closing[:0]
        if not len(found):
            allowed = _has(mask, self._all).nonzero()[0]
            if closes and self._draw.random() < 0.5:  # the longest ones
                allowed = allowed[self._lengths[allowed] == self._lengths[allowed[:1]]]
            found = self._all[[self._draw.choice(allowed)]] if len(allowed) else found
        return [int(token) for token in found]


def _completes(matcher: Any, way: Sequence[int]) -> bool:
    copy = matcher.deep_copy()
    return bool(copy.consume_tokens(way) and (copy.is_stopped() or copy.is_accepting()))


def _has(mask: Mask, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    return (mask[ids >> 5] >> (ids & 31).astype(np.uint32) & 1).astype(bool)
