"""Messages between a pool and a child.

A child's answer is a fixed struct of numbers with a text after it, and every part is checked.
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
"""Head of an answer: its kind, its numbers, bytes of text after it."""
NUMBERS = 6
MOST_TEXT_BYTES = 4000
MOST_CHARACTERS = 2000  # of a text that is shown
JOB = struct.Struct("<QQ")
"""Head of a job: the sizes of its two parts, which follow."""
GO = b"g"
"""Order that lets a child continue."""
MEASURED, HOLDS = b"m", b"h"
"""Answers of a decoder, see helpers.media."""
COMPILED, MASK, ENDED = b"c", b"k", b"n"
"""Answers about a grammar, see helpers.grammars."""
ERROR = b"e"
"""Answer with an error: its class, and its message in the next line."""
_MOST = 1 << 48  # limit of any number
_ERRORS = {
    e.__name__: e for e in (AudioError, ImageError, VideoError, PromptTooLongError, OptionError)
}


class BrokenAnswerError(Exception):
    """A child has sent what no intact child sends."""


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
        """The error that an ERROR tells. Raises BrokenAnswerError."""
        name, _, message = self.text.partition("\n")
        if name not in _ERRORS:
            raise BrokenAnswerError("an error of no known class")
        return _ERRORS[name](printable(message, MOST_CHARACTERS))


def packed(kind: bytes, *numbers: float, text: str = "") -> bytes:
    """Return an answer's bytes."""
    data = text.encode(errors="replace")[:MOST_TEXT_BYTES]
    return HEAD.pack(kind, *numbers, *[0.0] * (NUMBERS - len(numbers)), len(data)) + data


def next_answer(data: bytearray) -> Answer | None:
    """Take the first complete answer out of received bytes. Raises BrokenAnswerError."""
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


class Line:
    """A child's end of its connection. The child ends when the pool closes its own end."""

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
        """Return the next bytes. Raises EOFError where there will be none."""
        data = b""
        with suppress(ConnectionError):
            data = self._orders.read(count)
        if len(data) < count:
            raise EOFError("the pool has disconnected")
        return data
