"""Ids of requests, replies and their items."""

import itertools
import secrets
from hashlib import blake2b

_KEY = secrets.token_bytes(32)
_numbers = itertools.count()


def new_id(prefix: str) -> str:
    """Return an unguessable id. May be called in any thread.

    Reading the system's random bytes would release the GIL, and the event loop would wait for the
    stages' threads to get it back.
    """
    number = next(_numbers).to_bytes(8, "little")
    return prefix + blake2b(number, digest_size=12, key=_KEY).hexdigest()
