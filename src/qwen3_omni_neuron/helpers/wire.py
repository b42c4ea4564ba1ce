"""Messages between a pool and a child.

An answer is a fixed struct of numbers, and a text; both are checked.
"""

import socket
import struct
from contextlib import suppress
from typing import NamedTuple

from qwen3_omni_neuron.errors import (
    AudioError,
    ImageError,
    InputError,
    OptionError,
    PromptTooLongError,
    VideoError,
    printable,
)

HEAD = struct.Struct("<c6dI")
"""Head of an answer: kind, numbers, bytes of text after it."""
NUMBERS = 6
MOST_TEXT_BYTES = 4000
MOST_CHARACTERS = 2000  # limit of displayed text
JOB = struct.Struct("<QQ")
"""Head of a job: sizes of the two parts that follow."""
GO = b"g"
"""Permission to continue."""
MEASURED, HOLDS = b"m", b"h"
"""A decoder's answers, see helpers.media."""
COMPILED, MASK, ENDED = b"c", b"k", b"n"
"""A grammar's answers, see helpers.grammars."""
ERROR = b"e"
"""Error: its class, and its message in the next line."""
_MOST = 1 << 48  # limit of any number
_ERRORS = {
    e.__name__: e for e in (AudioError, ImageError, VideoError, PromptTooLongError, OptionError)
}


class BrokenAnswerError(Exception):
    """A child has sent an invalid answer."""


class Answer(NamedTuple):
    """Answer of a child. numbers: NUMBERS of them, from 0 to 2^48."""

    kind: bytes
    numbers: tuple[float, ...]
    text: str

    @property
    def whole(self) -> list[int]:
        """The numbers, rounded down."""
        return [int(number) for number in self.numbers]

    @property
    def error(self) -> InputError:
        """The error in an ERROR. Raises BrokenAnswerError."""
        name, _, message = self.text.partition("\n")
        if name not in _ERRORS:
            raise BrokenAnswerError("an error of unknown class")
        return _ERRORS[name](printable(message, MOST_CHARACTERS))


def packed(kind: bytes, *numbers: float, text: str = "") -> bytes:
    """Return an answer's bytes."""
    data = text.encode(errors="replace")[:MOST_TEXT_BYTES]
    return HEAD.pack(kind, *numbers, *[0.0] * (NUMBERS - len(numbers)), len(data)) + data


def next_answer(data: bytearray) -> Answer | None:
    """Remove and return the first complete answer. Raises BrokenAnswerError."""
    if len(data) < HEAD.size:
        return None
    kind, *numbers, length = HEAD.unpack_from(data)
    if length > MOST_TEXT_BYTES or not all(0 <= number <= _MOST for number in numbers):
        raise BrokenAnswerError("numbers out of bounds")
    end = HEAD.size + length
    if len(data) < end:
        return None
    text = data[HEAD.size : end].decode(errors="replace")
    del data[:end]
    return Answer(kind, tuple(numbers), text)


class Channel:
    """A child's end of its connection. The child ends when the pool disconnects."""

    def __init__(self, connection: socket.socket):
        self._connection, self._orders = connection, connection.makefile("rb")

    def send(self, kind: bytes, *numbers: float, text: str = "") -> None:
        """Send an answer."""
        self._connection.sendall(packed(kind, *numbers, text=text))

    def job(self) -> tuple[bytes, bytes]:
        """Return the parts of the job, which comes first. Raises EOFError."""
        sizes = JOB.unpack(self.receive(JOB.size))
        return self.receive(sizes[0]), self.receive(sizes[1])

    def receive(self, count: int) -> bytes:
        """Return the next bytes. Raises EOFError if the connection ends before."""
        data = b""
        with suppress(ConnectionError):
            data = self._orders.read(count)
        if len(data) < count:
            raise EOFError("the pool has disconnected")
        return data
