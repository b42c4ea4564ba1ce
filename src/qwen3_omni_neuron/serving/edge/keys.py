"""API keys, client secrets signed with them, and request rates."""

import binascii
import hashlib
import hmac
import json
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pybase64

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving.openai.errors import ApiError

MOST_CALLERS = 10_000  # callers whose rate is stored
MOST_SECRET_BYTES = 4096
"""Upper bound of a secret's session: in base64 it must fit a header of 8 KiB."""
_SECRET = b"ek_"  # required by OpenAI's browser clients
_SIGNED = b"client secret of a realtime session, version 1"
_MAC_BYTES = 32


def read_keys(file: Path) -> tuple[str, ...]:
    """Read a file's keys, one per line; # begins a comment. Raises OptionError if empty."""
    try:
        lines = map(str.strip, file.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as error:
        raise OptionError(f"the file of API keys can't be read: {error}.") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise OptionError(f"{file} has no API key: write one on each line.")
    return keys


class Keys:
    """API keys. Only hashes are compared and used in names.

    Client secrets are signed with a key's own secret, and end with it.
    """

    def __init__(self, keys: Iterable[str]):
        # An environment variable may have bytes that are not UTF-8.
        encoded = [key.encode(errors="surrogateescape") for key in keys]
        self._digests = [hashlib.sha256(key).digest() for key in encoded]
        self._signers = {
            _owner_of(digest): hmac.digest(key, _SIGNED, "sha256")
            for key, digest in zip(encoded, self._digests, strict=True)
        } or {"": secrets.token_bytes(32)}  # else secrets end with the server

    def owner(self, authorization: bytes | None, address: str) -> str:
        """Return a request sender's name: the key's or, without keys, the address.

        authorization: the header, in UTF-8. Takes constant time. Raises ApiError 401.
        """
        if not self._digests:
            return f"address {address}"
        scheme, _, key = (authorization or b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "no valid API key. Send one in the header `Authorization: Bearer KEY`.",
                "invalid_api_key",
            )
        return _owner_of(given)

    def secret(self, owner: str, session: dict[str, Any], expires_at: int) -> str:
        """Return a secret that opens an owner's realtime sessions. Raises ApiError.

        session: initial settings. expires_at: Unix seconds.
        """
        size = len(json.dumps(session, separators=(",", ":")))
        if size > MOST_SECRET_BYTES:
            raise ApiError(
                400,
                f"session has {size} bytes, and a secret holds {MOST_SECRET_BYTES}. Let the client "
                "send the rest in a session.update.",
                "session_too_large",
                "session",
            )
        content = json.dumps([expires_at, session], separators=(",", ":"), allow_nan=False).encode()
        signer = self._signers[owner if self._digests else ""]
        signed = hmac.digest(signer, content, "sha256") + content
        return (_SECRET + pybase64.urlsafe_b64encode(signed).rstrip(b"=")).decode()

    def guest(self, authorization: bytes | None) -> tuple[str, dict[str, Any]] | None:
        """Return a valid secret's owner, "" without keys, and session settings; else None.

        authorization: see `owner`. Takes constant time.
        """
        scheme, _, secret = (authorization or b"").partition(b" ")
        secret = secret.strip()
        if scheme.lower() != b"bearer" or not secret.startswith(_SECRET):
            return None
        secret = secret.removeprefix(_SECRET)
        try:
            signed = pybase64.b64decode(secret + b"=" * (-len(secret) % 4), b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        mac, content = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        owners = [
            owner
            for owner, signer in self._signers.items()
            if hmac.compare_digest(hmac.digest(signer, content, "sha256"), mac)
        ]
        if not owners:
            return None
        expires_at, session = json.loads(content)  # signed, so as `secret` wrote it
        return (owners[0], session) if time.time() < expires_at else None


def _owner_of(digest: bytes) -> str:
    return f"key {digest.hex()[:12]}"


class RequestRates:
    """Token bucket of requests per minute for each caller. For one thread."""

    def __init__(self, per_minute: int | None, now: Callable[[], float] = time.monotonic):
        self._per_minute, self._now = per_minute, now
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def count(self, caller: str) -> None:
        """Count a request. Raises ApiError 429 beyond the rate."""
        if self._per_minute is None:
            return
        left, now = self._filled(caller, self._per_minute), self._now()
        self._buckets.pop(caller, None)
        allowed = left >= 1
        self._buckets[caller] = (left - allowed, now)
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait_s = math.ceil((1 - left) * 60 / self._per_minute)
            raise ApiError(
                429,
                f"the limit is {self._per_minute} requests a minute per caller. Try again in "
                f"{wait_s} s.",
                "rate_limit_exceeded",
                retry_after_s=wait_s,
            )

    def left(self, caller: str) -> list[dict[str, Any]]:
        """Return the rate limit in OpenAI's format; an empty list without a limit."""
        most = self._per_minute
        if most is None:
            return []
        left = self._filled(caller, most)
        reset_s = (most - left) * 60 / most
        names = {"name": "requests", "limit": most, "remaining": int(left)}
        return [{**names, "reset_seconds": round(reset_s, 3)}]

    def _filled(self, caller: str, per_minute: int) -> float:
        now = self._now()
        left, since = self._buckets.get(caller, (float(per_minute), now))
        return min(per_minute, left + (now - since) * per_minute / 60)
