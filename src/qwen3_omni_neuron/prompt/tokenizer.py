"""A checkpoint's byte-level BPE tokenizer, read from its own files."""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.prompt.least_tokens import LeastTokens
from qwen3_omni_neuron.untrusted_files import check_json, read_bytes, read_json, read_text, reason

# Contractions, words, single digits, punctuation, line ends and blanks: Qwen2's, in every release.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Fields in which transformers 4 and 5 write the tokens that only some tokenizers have.
_MORE_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")
_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
AT_ONCE = 1 << 14  # characters that are tokenised within some ms
_PORTION = 1 << 16  # characters of a longer text tokenised at a time
_LONG = 1 << 18  # characters in one word: tokenising takes 60 to 90 bytes for each
# Places where a piece certainly ends and NFC joins nothing: before a blank or punctuation mark that
# follows a letter, and after a line's end. The first character is a set, which is found fast.
_CUT = re.compile(
    "[ \n、。，！？；：…]"
    "(?:(?<=\\S )|(?<=\n)(?=\\S)|(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5][^ \n]))"
)


class Tokenizer:
    """Converter between text and the token ids of one checkpoint.

    Reads tokenizer.json, or else vocab.json and merges.txt, and the added tokens of
    tokenizer_config.json.
    Source: transformers Qwen2Tokenizer.
    """

    def __init__(self, folder: Path):
        """Read the files. Raises CheckpointError where one is missing or can't be used."""
        try:
            config = read_json(folder / "tokenizer_config.json")
            if not isinstance(config, dict):
                raise ValueError("tokenizer_config.json holds no object")
            self._backend = _read_backend(folder)
            _add_tokens(self._backend, config.get("added_tokens_decoder", {}))
        except CheckpointError:
            raise
        # The library raises plain Exception for a file that it can't use.
        except Exception as error:
            raise CheckpointError(
                f"{folder} has no usable tokenizer: {reason(error)}. Download its files again."
            ) from error
        by_id = self._backend.get_added_tokens_decoder()
        added = tuple(by_id.values())
        self.added_tokens = tuple(token.content for token in added)
        self.special_tokens = tuple(token.content for token in added if token.special)
        # The same vocabulary, merges and pieces without the added tokens.
        self._words = Backend(self._backend.model)
        self._words.normalizer = self._backend.normalizer
        self._words.pre_tokenizer = self._backend.pre_tokenizer
        self._long = threading.Lock()  # one long text at a time
        self._divides = not any(t.lstrip or t.rstrip or _CUT.search(t.content) for t in added)
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        self.largest_id = max(*vocabulary.values(), *by_id, 0, 0)
        self.least_tokens = LeastTokens(vocabulary, added)
        self.chat_template: Any = config.get("chat_template")
        # By name, such as audio_bos_token; a chat template may use them.
        self.named_tokens = _named_tokens(config)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return the token ids of a text; special tokens written in it become one id each.

        most: a text with more tokens may be cut, as long as more than `most` ids are returned.
        Other threads go on while a long text is tokenised.
        """
        return self._encode(self._backend, text, most)

    def encode_words(self, text: str, most: int | None = None) -> list[int]:
        """Return the token ids of a text in which the names of special tokens are words.

        most: as in `encode`.
        """
        return self._encode(self._words, text, most)

    def _encode(self, backend: Backend, text: str, most: int | None) -> list[int]:
        if len(text) <= AT_ONCE:
            return backend.encode(text, add_special_tokens=False).ids
        token_ids: list[int] = []
        for portion in _portions(text) if self._divides else (text,):
            # Only the library's methods for batches release the interpreter lock.
            with self._long if len(portion) > _LONG else nullcontext():
                (encoding,) = backend.encode_batch_fast([portion], add_special_tokens=False)
            token_ids += encoding.ids
            if most is not None and len(token_ids) > most:
                break
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=True)

    def to_json(self) -> str:
        """Return this tokenizer in the library's own format, that of tokenizer.json."""
        return self._backend.to_str()

    def token(self, token_id: int) -> str:
        """Return the text of one token. Raises CheckpointError where the vocabulary lacks it."""
        text = self._backend.id_to_token(token_id)
        if text is None:
            raise CheckpointError(
                f"config.json names token {token_id}, and the tokenizer has "
                f"{self._backend.get_vocab_size()} tokens without it. Download the checkpoint's "
                "tokenizer files again."
            )
        return text


def _portions(text: str) -> Iterator[str]:
    """Divide a text into portions whose tokens together are the tokens of the text."""
    at, searched = 0, _PORTION
    while searched < len(text):
        found = _CUT.search(text, searched, searched + _PORTION)
        if found is None:
            searched += _PORTION  # in steps, because the search holds the interpreter lock
            continue
        end = found.end() if found[0] == "\n" else found.start()
        yield text[at:end]
        at, searched = end, end + _PORTION
    yield text[at:]


def _read_backend(folder: Path) -> Backend:
    whole = folder / "tokenizer.json"
    if whole.is_file():
        content = read_bytes(whole)
        check_json(content)
        backend = Backend.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
    else:
        vocab, merges = folder / "vocab.json", folder / "merges.txt"
        check_json(read_bytes(vocab))
        read_text(merges)
        backend = Backend(BPE.from_file(str(vocab), str(merges)))
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizers.NFC()
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    # The pieces are split already.
    byte_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, byte_symbols])
    return backend


def _add_tokens(backend: Backend, added: dict[str, dict[str, Any]]) -> None:
    """Add tokens that the BPE model lacks; the library numbers them in this order."""
    by_id = sorted((int(token_id), _added_token(token)) for token_id, token in added.items())
    backend.add_tokens([token for _, token in by_id])
    for token_id, token in by_id:
        got = backend.token_to_id(token.content)
        if got != token_id:
            raise CheckpointError(
                f"tokenizer_config.json has {token.content} as token {token_id}, and behind the "
                f"vocabulary it becomes {got}. Download the checkpoint's tokenizer files again."
            )


def _added_token(raw: dict[str, Any]) -> AddedToken:
    """Make a token. The library prints the names of further fields."""
    return AddedToken(**{name: raw[name] for name in _TOKEN_FIELDS if name in raw})


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the tokens that have a name, such as audio_bos_token."""
    found = {name: token for name, token in config.items() if name.endswith("_token")}
    for more in (config.get(key) for key in _MORE_TOKENS):
        found |= more if isinstance(more, dict) else {}
    # A token is written as a string, an object or null.
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
