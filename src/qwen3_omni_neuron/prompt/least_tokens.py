"""Lower bound of a text's number of tokens, computed from its bytes without tokenising it."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from unicodedata import is_normalized

import numpy as np
from tokenizers import AddedToken
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel

_SHORT = 1024  # characters: a shorter text is tokenised faster than measured
_SLICE = 1 << 16  # characters that are measured at a time
# NFC shortens no text to less than a quarter: the strongest case is 7 bytes of Greek to 2 (U+1FBE
# U+0308 U+0301 to U+0390).
_NFC_SHORTENS = 4
# Characters, in the scripts of most texts, that NFC never joins with the one before.
_STARTER = re.compile(
    "[\0-\u02ff\u0370-\u0482\u048a-\u0590\u05d0-\u05ea\u0620-\u064a\u0904-\u0939\u0e01-\u0e30"
    "\u2010-\u205e\u2100-\u2bff\u3001-\u3029\u3041-\u3096\u30a1-\u30fa\u3400-\u9fff\uac00-\ud7a3"
    "\U0001f000-\U0003ffff]"
)


class LeastTokens:
    """Lower bound of the number of tokens of texts, for one tokenizer's vocabulary.

    Each byte of a text counts as 1 / (length of the longest token with that byte): an "a" counts
    1/42 if the longest token with an "a" has 42 bytes. A token's bytes then sum to 1 at most, so
    the sum over all bytes of a text, as the tokenizer normalises it, is at most its number of
    tokens.
    """

    def __init__(self, vocabulary: Iterable[str], added: Sequence[AddedToken]):
        """vocabulary: tokens of a byte-level BPE, in its symbols. added: further tokens."""
        by_length = defaultdict(list)
        for token in vocabulary:
            by_length[len(token)].append(token)
        longest: dict[str, int] = {}
        for length in sorted(by_length):
            longest |= dict.fromkeys("".join(by_length[length]), length)
        # The tokenizer leaves out a byte that no token has, so it counts 0.
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
        """Return a lower bound of a text's number of tokens; 0 for a short text.

        enough: the count may stop once the bound is larger than this. The time is linear in the
        text, in steps of a fraction of a millisecond.
        """
        if len(text) < _SHORT:
            return 0
        tokens, at = 0.0, 0
        while at < len(text) and tokens <= enough + 1:
            end, whole = _slice_end(text, at)
            tokens += self._of_slice(text[at:end], whole)
            at = end
        return math.ceil(tokens - 1e-6)  # the rounding error of the sums is less

    def _of_slice(self, text: str, whole: bool) -> float:
        """Measure a slice. whole: normalised alone it is the same as within the text."""
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

    Printable bytes stand for themselves, the others are numbered from U+0100 on (as in GPT-2).
    """
    printable = set(ByteLevel.alphabet())
    others = iter(range(256, 512))
    return [chr(b) if chr(b) in printable else chr(next(others)) for b in range(256)]
