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

# Not skipped when special tokens are skipped in decoding, as in the released tokenizer.
_NOT_SPECIAL = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
# The order is that of the released ids 151643..151675.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    *_NOT_SPECIAL,
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
_EXTRA_SPECIAL_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
# Each role must be one token: the talker reads a turn's role from one token.
ROLES = ("system", "user", "assistant")
WORDS = (
    *ROLES,
    " the",
    " and",
    " you",
    " is",
    " of",
    " to",
    " hello",
    " yes",
    " no",
    " one",
    " two",
    " three",
    " red",
    " green",
    " blue",
)


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
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token not in _NOT_SPECIAL,
            }
            for token, index in special_ids.items()
        },
        "additional_special_tokens": [t for t in SPECIAL_TOKENS[1:] if t not in _NOT_SPECIAL],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": _EXTRA_SPECIAL_TOKENS,
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3OmniMoeProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        **_EXTRA_SPECIAL_TOKENS,
    }


def write_json(path: Path, value: object) -> None:
    """Write a JSON file with indentation."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
