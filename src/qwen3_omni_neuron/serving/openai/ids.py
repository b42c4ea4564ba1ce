"""Ids of requests, replies and their items."""

import itertools
import secrets
from hashlib import blake2b

_KEY = secrets.token_bytes(32)
_numbers = itertools.count()
PUBLIC_ID_BYTES = 16
"""Length of an id that is all that a client needs where nobody has a key."""


def new_id(prefix: str, size: int = 12) -> str:
    """Return an unguessable id with a digest of `size` bytes. May be called in any thread.

    Reading the system's random bytes would release the GIL, and the event loop would wait for the
    stages' threads to get it back.
    """
    number = next(_numbers).to_bytes(8, "little")
    return prefix + blake2b(number, digest_size=size, key=_KEY).hexdigest()
