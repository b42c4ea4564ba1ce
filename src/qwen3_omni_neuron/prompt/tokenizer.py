"""A checkpoint's byte-level BPE tokenizer, read from its files; lower bounds of token counts."""

import json
import re
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn
from unicodedata import is_normalized

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from qwen3_omni_neuron.checkpoint.json_files import read_bytes, read_json, read_text, reason
from qwen3_omni_neuron.errors import CheckpointError, format_value
from qwen3_omni_neuron.prompt.messages import MEDIA_KINDS
from qwen3_omni_neuron.prompt.pauses import pause

# Contractions, words, single digits, punctuation, line ends and blanks: in every release of Qwen2.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Fields in which transformers 4 and 5 write optional tokens.
_MORE_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")
_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
AT_ONCE = 1 << 14  # characters tokenised within some ms
_QUICK = 1 << 10  # characters tokenised within 0.5 ms
_PORTION = 1 << 16  # characters of a longer text searched or tokenised at a time
_JOINED = 4  # upper bound of a text's first characters that NFC joins to text before it
_LONG = 1 << 18  # characters in one word: tokenising takes 60 to 90 bytes for each
# Certain ends of a piece, at which NFC joins nothing: before a blank or punctuation mark after a
# letter, and after a line end. The pattern begins with a set, which is found fast.
_CUT = re.compile(
    "[ \n、。，！？；：…]"
    "(?:(?<=\\S )|(?<=\n)(?=\\S)|(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5][^ \n]))"
)


class Tokenizer:
    """Converter between text and token ids.

    Reads tokenizer.json, or vocab.json and merges.txt, and tokenizer_config.json's added tokens.
    Source: transformers Qwen2Tokenizer.
    """

    def __init__(self, folder: Path):
        try:
            config = read_json(folder / "tokenizer_config.json")
            if not isinstance(config, dict):
                raise ValueError("tokenizer_config.json is not an object")
            self._backend = _read_backend(folder)
            _add_tokens(self._backend, config.get("added_tokens_decoder", {}))
        except CheckpointError:
            raise
        # The library raises plain Exception for an unusable file.
        except Exception as error:
            raise CheckpointError(
                f"{folder} has no usable tokenizer: {reason(error)}. Download its files again."
            ) from error
        by_id = self._backend.get_added_tokens_decoder()
        added = tuple(by_id.values())
        self.added_tokens = tuple(token.content for token in added)
        self.special_tokens = tuple(token.content for token in added if token.special)
        self._words = Backend(self._backend.model)
        self._words.normalizer = self._backend.normalizer
        self._exact = Backend(self._backend.model)
        for backend in (self._words, self._exact):
            backend.pre_tokenizer = self._backend.pre_tokenizer
        self._long = threading.Lock()  # one long text at a time
        self._divides = not any(t.lstrip or t.rstrip or _CUT.search(t.content) for t in added)
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        # A token of the vocabulary has one symbol per byte.
        names = (len(token.encode()) for token in self.added_tokens)
        self._longest_bytes = max(*map(len, vocabulary), *names, 1, 1)
        self._bytes_of_symbols = {symbol: byte for byte, symbol in enumerate(_symbols())}
        self.chat_template: Any = config.get("chat_template")
        self.named_tokens = _named_tokens(config)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return the token ids of a text; each special token's name becomes one id.

        most: a text with more tokens may be cut after more than `most` ids.
        """
        return self._encode(self._backend, text, most)

    def encode_words(self, text: str, most: int | None = None) -> list[int]:
        """Return the token ids of a text, with names of special tokens as words."""
        return self._encode(self._words, text, most)

    def encode_exactly(self, text: str) -> list[int]:
        """Return ids that spell a text's exact bytes: words, not normalised."""
        return self._encode(self._exact, text, None)

    def _encode(self, backend: Backend, text: str, most: int | None) -> list[int]:
        if len(text) <= _QUICK:
            return backend.encode(text, add_special_tokens=False).ids
        token_ids: list[int] = []
        for portion in _portions(text) if self._divides and len(text) > AT_ONCE else (text,):
            pause()
            # Only the library's methods for batches release the interpreter lock.
            with self._long if len(portion) > _LONG else nullcontext():
                (encoding,) = backend.encode_batch_fast([portion], add_special_tokens=False)
            token_ids += encoding.ids
            if most is not None and len(token_ids) > most:
                break
        return token_ids

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens; 0 for a short text."""
        if len(text) <= AT_ONCE:
            return 0
        length = len(text)
        if not text.isascii():
            # unicodedata.normalize takes quadratic time for disordered marks.
            steps = [text[at : at + _PORTION] for at in range(0, length, _PORTION)]
            length = sum(map(self._normalized, steps)) - _JOINED * (len(steps) - 1)
        return -(-length // self._longest_bytes)

    def _normalized(self, text: str) -> int:
        pause()
        return len(self._backend.normalizer.normalize_str(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes: an added token's name, none for an unused id."""
        text, values = self._backend.id_to_token(token_id) or "", self._bytes_of_symbols
        if text in self.added_tokens or any(symbol not in values for symbol in text):
            return text.encode()
        return bytes(values[symbol] for symbol in text)

    def to_json(self) -> str:
        """Return this tokenizer as a tokenizer.json."""
        return self._backend.to_str()

    def token(self, token_id: int) -> str:
        """Return the text of one token. Raises CheckpointError for an unknown one."""
        text = self._backend.id_to_token(token_id)
        if text is None:
            raise CheckpointError(
                f"config.json names token {token_id}, which the tokenizer lacks. Download the "
                "checkpoint's tokenizer files again."
            )
        return text


def _portions(text: str) -> Iterator[str]:
    """Divide a text without changing its tokens."""
    at, searched = 0, _PORTION
    while searched < len(text):
        found = _CUT.search(text, searched, searched + _PORTION)
        if found is None:
            searched += _PORTION  # in steps: the search keeps the interpreter lock
            continue
        end = found.end() if found[0] == "\n" else found.start()
        yield text[at:end]
        at, searched = end, end + _PORTION
    yield text[at:]


def _read_backend(folder: Path) -> Backend:
    whole = folder / "tokenizer.json"
    if whole.is_file():
        backend = Backend.from_buffer(read_bytes(whole))
        backend.no_truncation()
        backend.no_padding()
    else:
        vocab, merges = folder / "vocab.json", folder / "merges.txt"
        backend = Backend(BPE.from_file(str(vocab), str(merges)))
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizers.NFC()
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    byte_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, byte_symbols])
    return backend


def _add_tokens(backend: Backend, added: dict[str, dict[str, Any]]) -> None:
    by_id = sorted((int(token_id), _added_token(token)) for token_id, token in added.items())
    backend.add_tokens([token for _, token in by_id])
    for token_id, token in by_id:
        got = backend.token_to_id(token.content)
        if got != token_id:
            raise CheckpointError(
                f"tokenizer_config.json has {token.content} as token {token_id}, but after the "
                f"vocabulary it is {got}. Download the checkpoint's tokenizer files again."
            )


def _added_token(raw: dict[str, Any]) -> AddedToken:
    return AddedToken(**{name: raw[name] for name in _TOKEN_FIELDS if name in raw})


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {name: token for name, token in config.items() if name.endswith("_token")}
    for more in (config.get(key) for key in _MORE_TOKENS):
        found |= more if isinstance(more, dict) else {}
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _symbols() -> list[str]:
    """Return byte-level BPE's character of each byte, as in GPT-2."""
    printable = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(range(256, 512))
    return [chr(b) if chr(b) in printable else chr(next(others)) for b in range(256)]


ITEM_TYPES = ("text", *MEDIA_KINDS, "function")


class SpecialNames:
    """Names of special tokens, and patterns that find them.

    marked: names that are words in a caller's text. heads, tails: beginnings and ends that may form
    a name where texts are joined.
    """

    def __init__(self, tokenizer: Tokenizer, marked: Collection[str] | None = None):
        """marked: names that are words in a text; None: all."""
        self.tokenizer = tokenizer
        # Longer names first: they win if two match.
        found = (name for name in tokenizer.added_tokens if len(name) > 1)
        names = sorted(found, key=len, reverse=True)
        self.any, self.ids = _any_of(names), {name: tokenizer.encode(name) for name in names}
        names = [name for name in names if marked is None or name in marked]
        self.marked, self.longest = _any_of(names), max(map(len, names), default=0)
        self.heads = tuple({name[:n] for name in names for n in range(1, len(name))})
        self.tails = tuple({name[-n:] for name in names for n in range(1, len(name))})


class LiteralText:
    """Marker of the special tokens' names in one conversation's texts.

    `mark` puts an unguessable separator into each name in a text, and at edges where a template may
    join a name. `encode` removes them, and tokenises text between the template's own names as
    words.
    """

    def __init__(self, names: SpecialNames):
        self._names = names
        self._drawn: str | None = None

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages for a chat template, with the caller's texts marked."""
        marked = []
        for m in messages:
            pause()
            marked.append({k: v if k == "role" else self._mark_all(v) for k, v in m.items()})
        return marked

    def mark(self, text: str) -> str:
        """Return a text with separators in its names of special tokens."""
        marked, before = self._separate(text), text
        while marked != before:
            marked, before = self._separate(marked), marked
        if text.startswith(self._names.tails):
            marked = self._separator + marked
        if text.endswith(self._names.heads):
            marked += self._separator
        return marked

    def unmarked(self, prompt: str) -> str:
        """Return a prompt without the separators."""
        return prompt if self._drawn is None else prompt.replace(self._drawn, "")

    def encode(self, prompt: str, most: int | None = None) -> list[int]:
        """Return the token ids of a prompt of marked texts. most: see `Tokenizer.encode`."""
        tokenizer, ids = self._names.tokenizer, self._names.ids
        # All names are the template's own, and NFC forms no new ones.
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

    def _separate(self, text: str) -> str:
        """Put a separator into each name, in steps: the search keeps the interpreter lock."""
        parts, at, searched = list[str](), 0, 0
        for begin in range(0, len(text), _PORTION):
            pause()
            end = begin + _PORTION
            longest = self._names.longest
            for name in self._names.marked.finditer(text, max(searched, begin), end + longest):
                if name.start() >= end:
                    break
                parts += [text[at : name.start() + 1], self._separator]
                at, searched = name.start() + 1, name.end()
        return "".join((*parts, text[at:]))


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)))


def _pieces(names: re.Pattern[str], text: str) -> Sequence[tuple[str, str]]:
    """Return pairs of text and the name after it; the last name is empty."""
    found, at = [], 0
    for match in names.finditer(text):
        found.append((text[at : match.start()], match[0]))
        at = match.end()
    return [*found, (text[at:], "")]


class ChatTemplate:
    """Chat template of a checkpoint, in transformers' sandbox."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        """Compile the template. Raises CheckpointError for a missing or unusable one."""
        self._folder = folder
        self._named_tokens = tokenizer.named_tokens
        try:
            text = _read_template(folder, tokenizer.chat_template)
            environment = _environment()
            self._template = environment.from_string(text)
            self.takes_tools = "tools" in find_undeclared_variables(environment.parse(text))
        except CheckpointError:
            raise
        except Exception as error:  # the compiler's depth is limited, too
            raise CheckpointError(
                f"{folder} has no usable chat template: {reason(error)}. Use the checkpoint's own."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt's text, up to the beginning of the assistant's answer.

        tools: functions that the reply may call. Raises CheckpointError if the template fails.
        """
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._named_tokens,
            )
            if not text.isascii():
                text.encode()  # half of a surrogate pair can't be tokenised
            return text
        except Exception as error:  # a template can divide by zero, or pass wrong arguments
            raise CheckpointError(
                f"the chat template of {self._folder} refuses the conversation: {reason(error)}. "
                "Use the checkpoint's own template, or another conversation."
            ) from error


class _Generation(Extension):
    """The tag `generation`, which marks replies for training: its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Source: transformers utils/chat_template_utils.py, _cached_compile_jinja_template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_template(folder: Path, of_tokenizer: Any) -> str:
    jinja, legacy = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja.exists():
        return read_text(jinja)
    if legacy.exists():
        return _text_in(read_json(legacy))
    if of_tokenizer is None:
        raise CheckpointError(
            f"{folder} has no chat template: neither chat_template.jinja nor chat_template.json, "
            "nor one in tokenizer_config.json."
        )
    return _text_in({"chat_template": of_tokenizer})


def _text_in(raw: Any) -> str:
    template = raw.get("chat_template") if isinstance(raw, dict) else None
    if not isinstance(template, str):
        raise ValueError(f"chat_template must be a text, got {format_value(template)}")
    return template
