"""Limits of a JSON text, checked before it is parsed.

A parser makes an object of each value, and holds the interpreter lock to the end: 30 MiB of `[],`
would be 10 million objects, 20 seconds and gigabytes.
"""

from qwen3_omni_neuron.serving.openai.errors import ApiError

MOST_VALUES = 1 << 16  # a chat message has three values or more
MOST_DEPTH = 64  # nesting of lists and objects
# A parser takes 40 to 60 ns for each escape. Sound in base64 has at most 1 in 64 characters ("\/"),
# and a million escapes are more text than a prompt holds.
MOST_ESCAPES = 1 << 20
_STEP_BYTES = 1 << 16
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_json(body: bytes) -> None:
    """Refuse a JSON text that is too complex. Raises ApiError.

    Takes time linear in the text, in steps of a few milliseconds, and stops at the first limit that
    is exceeded. Does not check whether the text is valid JSON: the parser does.
    """
    at, in_string = 0, False
    values = quotes = escapes = depth = 0
    while at < len(body):
        step = body[at : at + _STEP_BYTES]
        if (len(step) - len(step.rstrip(b"\\"))) % 2:  # include the escaped character in the step
            step = body[at : at + _STEP_BYTES + 1]
        at += len(step)
        if b"\\" in step:
            escapes += step.count(b"\\")
            _check(escapes, MOST_ESCAPES, "escapes in its strings, such as \\n")
            step = step.replace(b"\\\\", b"").replace(b'\\"', b"")
        # The remaining quotes begin and end strings: a key and its value have four.
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
                return  # the parser stops here, too


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise ApiError(
            400,
            f"the JSON has more than {most} {what}, the most that are taken. Send less, or less "
            "at a time.",
            "body_too_complex",
        )
