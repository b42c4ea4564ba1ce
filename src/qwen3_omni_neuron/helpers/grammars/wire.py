"""Formats of the messages between the caller and a child that holds grammars.

Operations and answers are fixed structs, each with its tokens or text after it. A child answers
each COMPILE, BEGIN and STEP once, in order. Its masks lie in a file that both have: for each
matcher two rows of bits, the mask and the tokens that end its reply.
"""

import struct
from typing import NamedTuple

HELLO = struct.Struct("<I")
"""First message of a child: its process id."""
OPERATION = struct.Struct("<BxHII")
"""An operation, number of the matcher, number of the grammar, number of int32 tokens after it."""
STEP_WITH_TOKEN = struct.Struct("<BxHIIi")
"""A STEP with its one token."""
COMPILE, BEGIN, STEP, END, FORGET = range(1, 6)
"""COMPILE passes a file with the rules, as JSON. END and FORGET have no answer."""
ANSWER = struct.Struct("<BBHIII")
"""Operation, flags, matcher, CPU microseconds, KiB of memory grown, bytes of text after it."""
STOPPED, FAILED = 1, 2
"""Flags: the grammar has ended; it can't be used or go on, and the text says why."""
MOST_TEXT_BYTES = 2000
VOCABULARY = struct.Struct("<II")
"""Begin of the vocabulary's file: number of logits, token that ends a turn; the JSON follows."""


class BrokenChildError(Exception):
    """A child has sent what no intact child sends, or has ended."""


class Answer(NamedTuple):
    """Answer of a child.

    operation: COMPILE, BEGIN or STEP. flags: STOPPED or FAILED. matcher: its number. micros:
    microseconds of CPU time of the operation. grown_kib: KiB of memory that the child took for it.
    text: the reason where it FAILED.
    """

    operation: int
    flags: int
    matcher: int
    micros: int
    grown_kib: int
    text: str


def words_of(vocab_size: int) -> int:
    """Return the length of a row of bits: uint32 words."""
    return (vocab_size + 31) // 32


def read_answers(data: bytearray) -> list[Answer]:
    """Take the complete answers out of received bytes. Raises BrokenChildError."""
    answers, at = list[Answer](), 0
    while len(data) - at >= ANSWER.size:
        operation, flags, matcher, micros, grown_kib, length = ANSWER.unpack_from(data, at)
        if length > MOST_TEXT_BYTES:
            raise BrokenChildError("its text is too long")
        begin = at + ANSWER.size
        if len(data) < begin + length:
            break
        at = begin + length
        text = data[begin:at].decode(errors="replace") if length else ""
        answers.append(Answer(operation, flags, matcher, micros, grown_kib, text))
    del data[:at]
    return answers
