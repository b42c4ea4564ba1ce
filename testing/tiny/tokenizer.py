"""Tokenizer, chat template and preprocessor files of a tiny checkpoint.

The tokenizer is byte-level BPE in the released form (`vocab.json`, `merges.txt`,
`tokenizer_config.json`). Its vocabulary is the 256 bytes, the results of the merges that make each
listed word one token, and the released special tokens in the released order. As in the released
vocabulary, token 0 is "!", a real token.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from testing.tiny.sizes import read_text

_DATA = json.loads(read_text("tokenizer.json"))
SPECIAL_TOKENS: tuple[str, ...] = tuple(_DATA["tokens"])  # in the order of ids 151643..151675
# Not skipped when special tokens are skipped in decoding, as in the released tokenizer.
_NOT_SPECIAL = frozenset(_DATA["not_special"])
# Each role must be one token: the talker reads a turn's role from one token.
ROLES = ("system", "user", "assistant")
WORDS: tuple[str, ...] = (*ROLES, *_DATA["words"])


def write_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> dict[str, int]:
    """Write the tokenizer, chat template and preprocessor files into `folder`.

    words: each becomes one token, its leading space included.
    Returns the id of every token by its text, special tokens included: their number is the smallest
    vocabulary of a model with this tokenizer.
    """
    byte_symbols = _byte_symbols()
    merges = _merges(byte_symbols, words)
    ordered = [*sorted(byte_symbols.values()), *(a + b for a, b in merges)]
    vocab = {token: index for index, token in enumerate(ordered)}
    special_ids = {token: len(vocab) + i for i, token in enumerate(SPECIAL_TOKENS)}

    write_json(folder / "vocab.json", vocab)
    merge_lines = "".join(f"{a} {b}\n" for a, b in merges)
    (folder / "merges.txt").write_text("#version: 0.2\n" + merge_lines, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", _tokenizer_config(special_ids))
    write_json(folder / "chat_template.json", {"chat_template": read_text("chat_template.jinja")})
    preprocessor_config = json.loads(read_text("preprocessor_config.json"))
    write_json(folder / "preprocessor_config.json", preprocessor_config)
    return {**vocab, **special_ids}


def _byte_symbols() -> dict[int, str]:
    """Return the printable character that byte-level BPE files (of GPT-2) write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def _merges(byte_symbols: dict[int, str], words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the merges that make each word one token, from left to right."""
    merges: list[tuple[str, str]] = []
    for word in words:
        symbols = [byte_symbols[b] for b in word.encode()]
        left = symbols[0]
        for right in symbols[1:]:
            if (left, right) not in merges:
                merges.append((left, right))
            left += right
    return merges


def _tokenizer_config(special_ids: dict[str, int]) -> dict[str, object]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    added = {
        str(index): {"content": token, **flags, "special": token not in _NOT_SPECIAL}
        for token, index in special_ids.items()
    }
    return {**_DATA["config"], "added_tokens_decoder": added}


def write_json(path: Path, value: object) -> None:
    """Write a JSON file with indentation."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
