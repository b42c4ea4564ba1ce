"""Lower bound of a text's number of tokens, found from its bytes, before it is tokenised."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from unicodedata import is_normalized

import numpy as np
from tokenizers import AddedToken
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel

_SHORT = 1024  # characters: so few are tokenised sooner than they are measured
_SLICE = 1 << 16  # characters that are measured at a time
# NFC shortens no text to less than a quarter: the most is 7 bytes of Greek to 2 (U+1FBE U+0308
# U+0301 to U+0390).
_NFC_SHORTENS = 4
# Characters that NFC never joins with what comes before them, in the scripts of most texts.
_STARTER = re.compile(
    "[\0-\u02ff\u0370-\u0482\u048a-\u0590\u05d0-\u05ea\u0620-\u064a\u0904-\u0939\u0e01-\u0e30"
    "\u2010-\u205e\u2100-\u2bff\u3001-\u3029\u3041-\u3096\u30a1-\u30fa\u3400-\u9fff\uac00-\ud7a3"
    "\U0001f000-\U0003ffff]"
)


class LeastTokens:
    """Measure of texts by one tokenizer's vocabulary.

    A token that contains a byte has at most as many bytes as the longest one that does, so that a
    byte of a text is at least that part of a token: an "a" is a 42nd where the longest token with
    an "a" has 42 bytes. The sum over all bytes of a text, as the tokenizer normalises it, is never
    more than its tokens.
    """

    def __init__(self, vocabulary: Iterable[str], added: Sequence[AddedToken]):
        """vocabulary: tokens of a byte-level BPE, in its symbols. added: tokens beside them."""
        by_length = defaultdict(list)
        for token in vocabulary:
            by_length[len(token)].append(token)
        longest: dict[str, int] = {}
        for length in sorted(by_length):
            longest |= dict.fromkeys("".join(by_length[length]), length)
        # A byte of no token is left out by the tokenizer, and has no part of any.
        parts = np.array([1 / longest[s] if s in longest else 0.0 for s in _symbols()])
        for name in (token.content for token in added):
            content = name.encode()
            of_token = np.frombuffer(content, np.uint8)
            parts[of_token] = np.minimum(parts[of_token], 1 / max(1, len(content)))
        if any(token.lstrip or token.rstrip for token in added):  # with any number of blanks
            blanks = "".join(c for c in map(chr, range(0x3001)) if c.isspace())
            parts[np.frombuffer(blanks.encode(), np.uint8)] = 0.0
        self._parts = parts

    def __call__(self, text: str, enough: float = math.inf) -> int:
        """Return a number of tokens that a text has at least; 0 for a short one.

        enough: a larger bound than this may be any that is larger. Linear in the text, in steps of
        a fraction of a millisecond.
        """
        if len(text) < _SHORT:
            return 0
        tokens, at = 0.0, 0
        while at < len(text) and tokens <= enough + 1:
            end, whole = _slice_end(text, at)
            tokens += self._of_slice(text[at:end], whole)
            at = end
        return math.ceil(tokens - 1e-6)  # what sums of floats are wrong by is less

    def _of_slice(self, text: str, whole: bool) -> float:
        """Measure a slice. whole: normalised by itself it is what it is within the text."""
        content = text.encode("utf-8", "replace")  # half of a surrogate pair is refused later
        if whole and not text.isascii() and not is_normalized("NFC", text):
            content = NFC().normalize_str(content.decode()).encode()
        elif not whole:
            return len(content) / _NFC_SHORTENS * float(self._parts.min())
        counts = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
        return float(counts @ self._parts)


def _slice_end(text: str, at: int) -> tuple[int, bool]:
    """Return where a slice ends, and whether NFC joins nothing across either of its ends."""
    begins = at == 0 or _STARTER.match(text, at) is not None
    end = at + _SLICE
    if end >= len(text):
        return len(text), begins
    found = _STARTER.search(text, end, end + _SLICE)
    return (end + _SLICE, False) if found is None else (found.start(), begins)


def _symbols() -> list[str]:
    """Return the characters that byte-level BPE writes for the 256 bytes.

    Printable ones stand for themselves, the others are counted on from U+0100 (as in GPT-2).
    """
    printable = set(ByteLevel.alphabet())
    others = iter(range(256, 512))
    return [chr(b) if chr(b) in printable else chr(next(others)) for b in range(256)]
