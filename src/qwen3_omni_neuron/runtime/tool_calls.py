"""Calls of tools in a reply: found while its tokens are written, and passed on whole.

The format is that of Qwen3's chat templates: `<tool_call>`, a JSON object with the function's name
and its arguments, `</tool_call>`, the object on a line of its own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from qwen3_omni_neuron.errors import ToolCallError
from qwen3_omni_neuron.runtime.stop_strings import Decode, Encode, Marker, StopStrings

END_OF_THOUGHT = "</think>"
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class CompleteCall:
    """Complete call of a tool. arguments: JSON text."""

    name: str
    arguments: str

    @staticmethod
    def parse(body: str) -> "CompleteCall":
        """Parse the text between the two markers. Raises ToolCallError if it is not a call."""
        try:
            call = json.loads(body)
            arguments, name = call["arguments"], call["name"]
            # As the model writes them: a call that comes back in the history has the same tokens.
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written = arguments if isinstance(arguments, str) else written
            f"{name}{written}".encode()  # JSON can encode lone surrogates, UTF-8 can't
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _malformed() from error
        if not isinstance(name, str):
            raise _malformed()
        return CompleteCall(name, written)


class CallWatch:
    """Watch for calls over the tokens of one reply.

    The caller gets the tokens of a call when it is complete and well formed, all at once; those of
    a call that the reply's end cuts off come with the end. The talker gets the tokens before the
    first call, and none from there on. A token that may begin a call is held from both until later
    tokens decide.
    begun: a call has begun, so that the talker's text has ended.
    """

    def __init__(self, decode: Decode, encode: Encode, reasoning: bool):
        """reasoning: the reply begins with reasoning, in which nothing is a call."""
        self._decode, self._encode = decode, encode
        self._thought = Marker(END_OF_THOUGHT, decode) if reasoning else None
        self._start = StopStrings((CALL,), decode, encode)
        self._end: Marker | None = None  # where a call has begun
        self._held: list[int] = []
        self.begun = False

    @property
    def held(self) -> int:
        """Number of tokens that are held."""
        return len(self._held)

    def push(
        self, token_ids: Sequence[int], last: bool, by_model: bool
    ) -> tuple[list[int], list[int]]:
        """Add tokens. Returns the tokens for the caller, and those for the talker.

        last: the reply ends with them. by_model: the model has ended it, no limit and no string.
        Raises ToolCallError for a call that is malformed, or that the model itself does not end.
        """
        given: list[int] = []
        spoken: list[int] = []
        for token_id in token_ids:
            self._add(token_id, given, spoken)
        if last:
            if by_model and self._end is not None:
                raise _malformed()
            given += self._held
            spoken += [] if self.begun else self._start.flush()
            self._held = []
        return given, spoken

    def _add(self, token_id: int, given: list[int], spoken: list[int]) -> None:
        if self._thought is not None:
            if self._thought.push(token_id) is not None:
                self._thought = None
            given.append(token_id)
            spoken.append(token_id)
            return
        self._held.append(token_id)
        if self._end is None:
            passed, found = self._start.push(token_id)
            spoken += [] if self.begun else passed
            if found:
                self.begun, self._end = True, Marker(END_OF_CALL, self._decode)
            else:
                whole = self.held - self._start.held
                given += self._held[:whole]
                del self._held[:whole]
        elif self._end.push(token_id) is not None:
            body = self._decode(self._held).partition(CALL)[2]
            CompleteCall.parse(body.partition(END_OF_CALL)[0])
            given += self._held
            self._held, self._end = [], None
            self._start = StopStrings((CALL,), self._decode, self._encode)


def _malformed() -> ToolCallError:
    return ToolCallError(
        "the model wrote a call of a tool that is not a JSON object with a name and arguments. "
        "Nothing of the call is kept: ask again, or install llguidance, which holds calls to their "
        'form: pip install "qwen3-omni-neuron[serve]".'
    )
