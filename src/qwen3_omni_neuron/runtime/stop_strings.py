"""Strings that end a reply, and tool calls, detected while tokens are written.

Calls are in the format of Qwen3's chat templates.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from qwen3_omni_neuron.errors import ToolCallError

END_OF_THOUGHT = "</think>"
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
INCOMPLETE = "\ufffd"  # decodes from part of a character
_MOST_INCOMPLETE = 3  # a character has at most 4 bytes
# Bytes of the longest stop string, which may contain special tokens without text.
MOST_BUFFERED = 1024

Decode = Callable[[list[int]], str]
Encode = Callable[[str], list[int]]


class TextCodec(Protocol):
    """Tokenizer, as the runtime uses it."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the tokens' text, without special tokens."""
        ...

    def encode_exactly(self, text: str) -> list[int]:
        """Return token ids that spell exactly this text; special tokens' names are words."""
        ...


class StopStrings:
    """Detector of stop strings over the tokens of one reply.

    Tokens that may begin a stop string are buffered, so that caller and talker get no part of one.
    """

    def __init__(self, strings: Sequence[str], decode: Decode, encode: Encode):
        self._strings, self._decode, self._encode = tuple(strings), decode, encode
        self._buffered: list[int] = []
        self._texts: list[str] = []  # [i]: text of the first i + 1 buffered tokens

    @property
    def buffered(self) -> int:
        """Number of buffered tokens."""
        return len(self._buffered)

    def push(self, token_id: int) -> tuple[list[int], bool]:
        """Add a token. Returns the tokens to pass on, and whether the reply ends.

        Text before a stop string that begins inside a token is tokenised again.
        """
        self._buffered.append(token_id)
        text = self._decode(self._buffered)
        self._texts.append(text)
        # An incomplete character may become any character.
        whole = len(text) - min(len(text) - len(text.rstrip(INCOMPLETE)), _MOST_INCOMPLETE)
        found = [at for s in self._strings if (at := text.find(s, 0, whole)) >= 0]
        if found:
            passed, spelled = self._pass_on(min(found))
            rest = text[spelled : min(found)]
            self.flush()
            return passed + (self._encode(rest) if rest else []), True
        if len(self._buffered) > MOST_BUFFERED:
            return self.flush(), False
        return self._pass_on(whole - self._begun(text[:whole]))[0], False

    def flush(self) -> list[int]:
        """Return the buffered tokens at the reply's end."""
        passed, self._buffered, self._texts = self._buffered, [], []
        return passed

    def _begun(self, text: str) -> int:
        longest = max(map(len, self._strings)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0

    def _pass_on(self, length: int) -> tuple[list[int], int]:
        """Release tokens of at most `length` characters. Returns them and their length."""
        text = self._texts[-1]
        for count in range(len(self._buffered), 0, -1):
            spelled = self._texts[count - 1]
            if len(spelled) <= length and text.startswith(spelled):
                passed, self._buffered = self._buffered[:count], self._buffered[count:]
                self._texts = [later[len(spelled) :] for later in self._texts[count:]]
                return passed, len(spelled)
        return [], 0


class Marker:
    """Detector of one string of single-byte characters."""

    def __init__(self, string: str, decode: Decode):
        self._string, self._decode = string, decode
        self._tail: list[int] = []  # a token has at least one byte

    def push(self, token_id: int) -> str | None:
        """Add a token. Returns the text after the string once it was written."""
        self._tail = [*self._tail, token_id][-len(self._string) :]
        _, found, rest = self._decode(self._tail).partition(self._string)
        return rest if found else None


_OUTSIDE = re.compile(f'"|{END_OF_CALL}')
_INSIDE = re.compile(r'"|\\.', re.DOTALL)


class CallText:
    """Text of an unfinished call; ignores the end marker inside JSON strings."""

    def __init__(self) -> None:
        self.text = ""
        self._at, self._in_string = 0, False  # searched up to here

    def push(self, text: str) -> str | None:
        """Add text. Returns the text after the call once it has ended."""
        self.text += text
        while found := (_INSIDE if self._in_string else _OUTSIDE).search(self.text, self._at):
            self._at = found.end()
            if found[0] == END_OF_CALL:
                rest, self.text = self.text[self._at :], self.text[: found.start()]
                return rest
            self._in_string ^= found[0] == '"'
        begun = self.text.endswith("\\") if self._in_string else len(END_OF_CALL) - 1
        self._at = max(self._at, len(self.text) - begun)
        return None


@dataclass(frozen=True)
class CompleteCall:
    """Complete tool call. arguments: JSON text."""

    name: str
    arguments: str

    @staticmethod
    def parse(body: str) -> "CompleteCall":
        """Parse the text between the markers. Raises ToolCallError."""
        try:
            call = json.loads(body)
            arguments, name = call["arguments"], call["name"]
            # As the model writes them, so that the history has the same tokens.
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written = arguments if isinstance(arguments, str) else written
            f"{name}{written}".encode()  # lone surrogates fail
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _malformed() from error
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            raise _malformed()
        return CompleteCall(name, written)


class CallWatch:
    """Detector of calls over the tokens of one reply.

    The caller gets a call's tokens at once when it is complete and well formed, an unfinished
    call's at the end. The talker gets the tokens before the first call. begun: a call has begun.
    """

    def __init__(self, decode: Decode, encode: Encode, reasoning: bool):
        """reasoning: the reply begins with reasoning, which has no calls."""
        self._decode, self._encode = decode, encode
        self._thought = Marker(END_OF_THOUGHT, decode) if reasoning else None
        self._start = StopStrings((CALL,), decode, encode)
        self._call: CallText | None = None  # unfinished call
        self._buffered: list[int] = []
        self.begun = False

    @property
    def buffered(self) -> int:
        """Number of buffered tokens."""
        return len(self._buffered)

    def push(
        self, token_ids: Sequence[int], last: bool, by_model: bool
    ) -> tuple[list[int], list[int]]:
        """Add tokens. Returns the tokens for the caller, and for the talker.

        last: the reply ends with them. by_model: the model ended it. Raises ToolCallError for a
        malformed call, or one that the model does not end.
        """
        given: list[int] = []
        spoken: list[int] = []
        for token_id in token_ids:
            self._add(token_id, given, spoken)
        if last:
            if by_model and self._call is not None:
                raise _malformed()
            given += self._buffered
            spoken += [] if self.begun else self._start.flush()
            self._buffered = []
        return given, spoken

    def _add(self, token_id: int, given: list[int], spoken: list[int]) -> None:
        if self._thought is not None:
            if self._thought.push(token_id) is not None:
                self._thought = None
            given.append(token_id)
            spoken.append(token_id)
            return
        self._buffered.append(token_id)
        if self._call is None:
            passed, found = self._start.push(token_id)
            spoken += [] if self.begun else passed
            if found:
                self.begun, self._call = True, CallText()
                self._call.push(self._body())
            else:
                whole = self.buffered - self._start.buffered
                given += self._buffered[:whole]
                del self._buffered[:whole]
        elif self._call.push(self._decode([token_id])) is not None:
            # A character of several tokens is complete only here.
            whole_call = CallText()
            whole_call.push(self._body())
            CompleteCall.parse(whole_call.text)
            given += self._buffered
            self._buffered, self._call = [], None
            self._start = StopStrings((CALL,), self._decode, self._encode)

    def _body(self) -> str:
        return self._decode(self._buffered).partition(CALL)[2]


def _malformed() -> ToolCallError:
    return ToolCallError(
        "the model wrote a tool call that is not a JSON object with a name and arguments. The call "
        "was dropped: ask again, or install llguidance, which enforces the form: pip install "
        '"qwen3-omni-neuron[serve]".'
    )
