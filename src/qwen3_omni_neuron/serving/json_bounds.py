"""Limits of a JSON text, checked before it becomes objects.

A parser makes an object of each value, with the interpreter lock held to the end: 30 MiB of `[],`
would be 10 million of them, 20 seconds and gigabytes.
"""

from qwen3_omni_neuron.serving.errors import ApiError

MOST_VALUES = 1 << 16  # a message of a chat has three and more
MOST_DEPTH = 64  # of lists and objects in each other
# Each takes a parser 40 to 60 ns. Sound in base64 has 1 in 64 characters at most ("\/"), and a
# million of them are more text than a prompt holds.
MOST_ESCAPES = 1 << 20
_STEP_BYTES = 1 << 16
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_json(body: bytes) -> None:
    """Refuse a JSON text that is too complex. Raises ApiError.

    Linear in the text, in steps of a few milliseconds, and no further than the first that is too
    much. Whether it is JSON is the parser's to find.
    """
    at, in_string = 0, False
    values = quotes = escapes = depth = 0
    while at < len(body):
        step = body[at : at + _STEP_BYTES]
        if (len(step) - len(step.rstrip(b"\\"))) % 2:  # the character that is escaped belongs to it
            step = body[at : at + _STEP_BYTES + 1]
        at += len(step)
        if b"\\" in step:
            escapes += step.count(b"\\")
            _check(escapes, MOST_ESCAPES, "escapes in its strings, such as \\n")
            step = step.replace(b"\\\\", b"").replace(b'\\"', b"")
        # The quotes that are left begin and end strings: a key and its value have four.
        in_step = step.count(b'"')
        quotes += in_step
        _check(quotes // 4, MOST_VALUES, "values")
        outside = b"".join(step.split(b'"')[in_string::2])
        in_string ^= in_step % 2 == 1
        values += sum(map(outside.count, (b",", b"[", b"{")))
        _check(values, MOST_VALUES, "values")
        for bracket in outside.translate(None, _NOT_BRACKETS):
            depth += 1 if bracket in b"[{" else -1
            _check(depth, MOST_DEPTH, "lists and objects in each other")
            if depth < 0:
                return  # the parser goes no further, either


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise ApiError(
            400,
            f"the JSON has more than {most} {what}, the most that are taken. Send less, or less "
            "at a time.",
            "body_too_complex",
        )
