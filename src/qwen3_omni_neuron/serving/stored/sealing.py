"""Encryption of the files of a session folder, with keys that the operator writes into a file."""

import hmac
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving.edge.keys import numbered_lines

MAKE_KEY = "openssl rand -hex 32"
"""Command that prints a new key."""
CHUNK_BYTES = 1 << 20  # encrypted at a time: the interpreter's lock is held for half a millisecond
TAG_BYTES = 16
_MAGIC = b"q3okept\x01"  # the last byte is the format's version
_KEY_BYTES, _ID_BYTES, _SALT_BYTES = 32, 8, 16
_HEADER_BYTES = len(_MAGIC) + _ID_BYTES + _SALT_BYTES


class SealError(Exception):
    """A file is not what was written under its name: changed, cut off, or of another format."""


class UnknownKeyError(SealError):
    """A file was encrypted with a key that is not among the present ones."""

    def __init__(self) -> None:
        super().__init__("the key that encrypted it is not among those of the server")


class _Key:
    """One key of the operator's, from which a key for each use is derived."""

    def __init__(self, secret: bytes):
        self.id = hmac.digest(secret, b"id", sha256)[:_ID_BYTES]
        self._files = hmac.digest(secret, b"files", sha256)
        self._owners = hmac.digest(secret, b"owners", sha256)

    def owner_name(self, owner: str) -> str:
        return self.id.hex() + hmac.digest(self._owners, owner.encode(), sha256)[:16].hex()

    def cipher(self, salt: bytes) -> AESGCM:
        """Return the cipher of the one file that has this salt."""
        return AESGCM(hmac.digest(self._files, salt, sha256))


class Seal:
    """Cipher of a folder's files: AES-256-GCM, a chunk at a time.

    The first of its keys encrypts, all of them decrypt. A file is bound to its name: under another
    one it is refused, as is a file that was changed, cut off or put together from others.
    """

    def __init__(self, secrets: Sequence[bytes]):
        """secrets: keys of 32 bytes, at least one."""
        self._keys = [_Key(secret) for secret in secrets]

    @staticmethod
    def read(file: Path) -> "Seal":
        """Read the keys from a file, one a line; skip empty lines and lines that begin with #.

        Raises OptionError, without a word of any key, if the file can't be used.
        """
        secrets: list[bytes] = []
        for number, line in numbered_lines(file, "the keys of the session folder").items():
            try:
                secret = bytes.fromhex(line)
            except ValueError:
                secret = b""
            if len(secret) != _KEY_BYTES or secret in secrets:
                wrong = "is there already" if secret in secrets else "has no 64 hexadecimal digits"
                raise OptionError(
                    f"{file}: the key in line {number} {wrong}. `{MAKE_KEY}` makes a key."
                )
            secrets.append(secret)
        if not secrets:
            raise OptionError(f"{file} has no key: `{MAKE_KEY} > {file}` writes one.")
        return Seal(secrets)

    def owner_names(self, owner: str) -> list[str]:
        """Return names that stand for an owner, one a key, by which nobody else can tell it.

        They have 48 characters, and differ where keys differ.
        """
        return [key.owner_name(owner) for key in self._keys]

    def has_key_of(self, name: str) -> bool:
        """Return whether a name, or what it begins, comes from one of the keys."""
        return any(name.startswith(key.id.hex()) for key in self._keys)

    def write(self, file: BinaryIO, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a file's whole content, given in parts.

        name: the file's, without which it can't be read again.
        """
        key, salt = self._keys[0], os.urandom(_SALT_BYTES)
        header = _MAGIC + key.id + salt
        file.write(header)
        cipher, bound = key.cipher(salt), header + name.encode()
        last = _chunks(sum(map(len, parts))) - 1
        for number, chunk in enumerate(_chunked(parts)):
            file.write(cipher.encrypt(_nonce(number, number == last), chunk, bound))

    def unsealed(self, file: BinaryIO, name: str, size: int) -> bytearray:
        """Return the data of a file that `write` has written. size: the file's bytes.

        Raises UnknownKeyError and SealError.
        """
        header = file.read(_HEADER_BYTES)
        key, salt = self._key_of(header), header[-_SALT_BYTES:]
        cipher, bound = key.cipher(salt), header + name.encode()
        left, data = size - _HEADER_BYTES, bytearray()
        for number in count():
            sealed = file.read(min(left, CHUNK_BYTES + TAG_BYTES))
            left -= CHUNK_BYTES + TAG_BYTES
            try:
                data += cipher.decrypt(_nonce(number, left <= 0), sealed, bound)
            except InvalidTag as error:
                raise SealError("it was changed or cut off since it was written") from error
            if left <= 0:
                break
        return data

    @staticmethod
    def sealed_bytes(size: int) -> int:
        """Return the bytes of a file with so many bytes of data."""
        return _HEADER_BYTES + size + TAG_BYTES * _chunks(size)

    def _key_of(self, header: bytes) -> _Key:
        if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
            raise SealError("it is of another format")
        key_id = header[len(_MAGIC) : len(_MAGIC) + _ID_BYTES]
        for key in self._keys:
            if key.id == key_id:
                return key
        raise UnknownKeyError


def _chunks(size: int) -> int:
    return max(1, -(-size // CHUNK_BYTES))


def _chunked(parts: Sequence[bytes | memoryview]) -> Iterator[bytearray]:
    """Yield the parts' bytes in chunks, which are of CHUNK_BYTES but for the last; at least one."""
    chunk = bytearray()
    for part in parts:
        view = memoryview(part)
        while view:
            if len(chunk) == CHUNK_BYTES:
                yield chunk
                chunk = bytearray()
            taken = view[: CHUNK_BYTES - len(chunk)]
            chunk += taken
            view = view[len(taken) :]
    yield chunk


def _nonce(number: int, last: bool) -> bytes:
    """Return the nonce of a chunk. A file has a key of its own, and so any nonce only once."""
    return number.to_bytes(11, "big") + bytes([last])
