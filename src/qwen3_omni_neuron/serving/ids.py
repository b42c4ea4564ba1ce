"""Ids of requests, replies and what is in them."""

import itertools
import secrets
from hashlib import blake2b

_KEY = secrets.token_bytes(32)
_numbers = itertools.count()


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess, from any thread.

    It asks the system for no random bytes, as that gives up the GIL, and the stages' threads would
    have it before the event loop goes on.
    """
    number = next(_numbers).to_bytes(8, "little")
    return prefix + blake2b(number, digest_size=12, key=_KEY).hexdigest()
