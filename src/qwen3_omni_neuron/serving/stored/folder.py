"""Session folder: encrypted files of sessions and spoken replies, bounded in bytes and age.

A file's name is two hashes. One is made of its owner, the other of a secret that its client alone
has. Several servers may share one folder. An empty file notes that a session's token was used.
"""

import logging
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Literal

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving import logs
from qwen3_omni_neuron.serving.openai.errors import RETRY_S, ApiError
from qwen3_omni_neuron.serving.stored.sealing import Seal, SealError, UnknownKeyError

Kind = Literal["session", "reply", "used"]
Reason = Literal["disk", "room", "gone", "content", "failed"]
SWEEP_S = 60.0
"""Interval at which files are removed whose time is over."""
_BLOCK = 4096  # a file takes whole blocks of the disk
_TEMPORARY_S = 3600.0  # a temporary file of this age was left by a process that has died
_NAME = re.compile(r"([0-9a-f]{48})\.[0-9a-f]{64}\.(session|reply|used)")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.tmp")


class NotKeptError(Exception):
    """Data could not be written to the folder.

    reason: "disk": the system refused; "room": a limit of the folder; "gone": the file that was to
    be replaced is no longer there; "content": it has no stored form; "failed": an error of ours.
    """

    def __init__(self, reason: Reason, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class _Entry:
    """A file of the folder. size: in whole blocks. written_s: time of writing, since 1970."""

    name: str
    owner: str
    size: int
    written_s: float


class SessionFolder:
    """Encrypted files, each of one owner, bounded in bytes and age.

    kept_s: seconds for which a file of each kind is kept after it was written; the notes that `use`
    makes are of the kind "used", empty and counted nowhere. most_bytes: bytes of all files; share:
    the fraction of them that one owner may have; the oldest files go first.
    largest: bytes of the largest file that is written or read. held: bytes of all files, as of the
    last look into the folder; other servers that share it are counted at each look.
    Methods wait for the disk, and so are not for the event loop's thread. `put` and `sweep` are for
    one thread, the folder's own, in which `later` calls them; the others for any.
    """

    def __init__(
        self,
        folder: Path,
        seal: Seal,
        kept_s: Mapping[Kind, float],
        most_bytes: int,
        share: float = 1.0,
        largest: int = 1 << 27,
        now: Callable[[], float] = time.time,
    ):
        """Make the folder if it is not there. Raises OptionError if it can't be written to."""
        self._folder, self._seal, self._kept_s, self._now = folder, seal, kept_s, now
        self._most, self._most_of_owner = most_bytes, int(most_bytes * share)
        self._largest = largest
        self._by_owner: Counter[str] = Counter()
        self._lost = False  # there are files of a key that is not there
        self.held = 0
        self._writer = ThreadPoolExecutor(1, "session folder")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._temporary() as (file, _):
                file.write(b"\0")
        except OSError as error:
            raise OptionError(
                f"the session folder {folder} can't be written to: {error}. Give --session-folder "
                "a folder that the server's user may write to."
            ) from error
        self.sweep()

    def later(self, call: Callable[..., Any], *given: Any) -> "Future[Any]":
        """Call a function in the folder's thread, after the earlier calls."""
        return self._writer.submit(call, *given)

    def close(self) -> None:
        """Wait until everything is written, and end the folder's thread."""
        self._writer.shutdown()

    def put(
        self,
        kind: Kind,
        owner: str,
        secret: str,
        parts: Sequence[bytes | memoryview],
        replaces: bool = False,
    ) -> None:
        """Write data, atomically. Raises NotKeptError; then an earlier version is left as it was.

        parts: the data's. secret: text without which it can't be found again. replaces: an earlier
        version must be there: where it was removed meanwhile, it does not come back.
        """
        own = self._seal.owner_names(owner)[0]
        path = self._folder / _name(own, secret, kind)
        data_bytes = sum(map(len, parts))
        size = _blocks(self._seal.sealed_bytes(data_bytes))
        if data_bytes > self._largest:
            message = f"it has {data_bytes} bytes, and a file may have {self._largest}"
            raise NotKeptError("room", message)
        try:
            self._make_room(path, own, size)
            with self._temporary() as (file, temporary):
                self._seal.write(file, path.name, parts)
                file.flush()
                os.fsync(file.fileno())
                before = _size_of(path)
                if replaces and not before:
                    raise NotKeptError("gone", "its file is no longer there")
                temporary.replace(path)
        except OSError as error:
            raise NotKeptError("disk", f"the disk refused it: {error}") from error
        self._by_owner[own] += size - before
        self.held = self._by_owner.total()

    def get(
        self, kind: Kind, owner: str, secret: str, hold: Callable[[int], None] | None = None
    ) -> bytearray | None:
        """Read data; None if it was never there, has expired, was removed or is another owner's.

        hold: called with the bytes that are about to be read. Raises ApiError if the data can't be
        read, and what `hold` raises.
        """
        try:
            for own in self._seal.owner_names(owner):
                path = self._folder / _name(own, secret, kind)
                with suppress(FileNotFoundError), self._opened(path) as (file, status):
                    if self._expired(kind, status.st_mtime):
                        return None
                    if hold is not None:
                        hold(status.st_size)
                    return self._seal.unsealed(file, path.name, status.st_size)
            end = _name("", secret, kind)
            if self._lost and any(path.name.endswith(end) for path in self._folder.iterdir()):
                raise UnknownKeyError
        except (SealError, OSError) as error:
            raise _unreadable(kind, error) from error
        return None

    def touch(self, kind: Kind, owner: str, secret: str) -> None:
        """Count the age of data from now on, if it is there."""
        path = self._folder / _name(self._seal.owner_names(owner)[0], secret, kind)
        with suppress(OSError):
            os.utime(path)

    def remove(self, kind: Kind, owner: str, secret: str) -> bool:
        """Remove data. Returns whether it was there. Raises OSError."""
        found = False
        for own in self._seal.owner_names(owner):
            with suppress(FileNotFoundError):
                (self._folder / _name(own, secret, kind)).unlink()
                found = True
        return found

    def use(self, owner: str, token: str) -> bool:
        """Note that a session's token is used. Returns False if it was already. Raises OSError.

        Of several servers that use it at the same time, one gets True. The note stays when the
        session's file is removed: one that is put back is refused.
        """
        for note in self._notes(owner, token):
            try:
                os.close(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                return False
        return True

    def is_used(self, owner: str, token: str) -> bool:
        """Return whether a session's token was used."""
        return any(map(os.path.lexists, self._notes(owner, token)))

    def unuse(self, owner: str, token: str) -> None:
        """Remove the note that a token is used, where its session was not resumed after all."""
        for note in self._notes(owner, token):
            note.unlink(missing_ok=True)

    def _notes(self, owner: str, token: str) -> list[Path]:
        """Return the paths of a token's notes, one a key, in the same order at all servers."""
        names = sorted(self._seal.owner_names(owner))
        return [self._folder / _name(own, token, "used") for own in names]

    def sweep(self) -> None:
        """Remove what has expired, and count the rest. Logs an error of the system."""
        try:
            self._count(self._look())
        except OSError as error:
            logs.event("session_folder_failed", logging.ERROR, error=str(error))

    def _make_room(self, path: Path, own: str, size: int) -> None:
        """Remove the oldest other files until one of this size fits in the place of `path`."""
        most = min(self._most, self._most_of_owner)
        if size > most:
            message = f"it takes {size} bytes, and one owner may have {most} of the folder"
            raise NotKeptError("room", message)
        if self._fits(own, size - _size_of(path)):
            return
        entries = self._look()
        self._count(entries)
        more = size - sum(entry.size for entry in entries if entry.name == path.name)
        others = (entry for entry in entries if entry.name != path.name)
        left = sorted(others, key=lambda entry: entry.written_s)
        while not self._fits(own, more):
            # From the owner with most files, so that one owner's many do not displace others.
            over = self._by_owner[own] + more > self._most_of_owner
            owners = (entry.owner for entry in left)
            whose = own if over else max(owners, key=self._by_owner.__getitem__)
            oldest = next(entry for entry in left if entry.owner == whose)
            left.remove(oldest)
            (self._folder / oldest.name).unlink(missing_ok=True)
            self._by_owner[whose] -= oldest.size

    def _fits(self, own: str, size: int) -> bool:
        fits_all = self._by_owner.total() + size <= self._most
        return fits_all and self._by_owner[own] + size <= self._most_of_owner

    def _count(self, entries: Sequence[_Entry]) -> None:
        self._by_owner = Counter()
        for entry in entries:
            self._by_owner[entry.owner] += entry.size
        self._lost = not all(map(self._seal.has_key_of, self._by_owner))
        self.held = self._by_owner.total()

    def _look(self) -> list[_Entry]:
        """Return the files whose time is not over, and remove those whose time is."""
        found: list[_Entry] = []
        with os.scandir(self._folder) as files:
            for file in files:
                name = _NAME.fullmatch(file.name)
                if name is None and not _TEMPORARY.fullmatch(file.name):
                    continue  # somebody else's
                with suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    if self._expired(None if name is None else name[2], status.st_mtime):
                        (self._folder / file.name).unlink()
                    elif name is not None and name[2] != "used":
                        size = _blocks(status.st_size)
                        found.append(_Entry(file.name, name[1], size, status.st_mtime))
        return found

    def _expired(self, kind: Any, written_s: float) -> bool:
        """Return whether a file's time is over. kind: None for a temporary file."""
        return written_s + (_TEMPORARY_S if kind is None else self._kept_s[kind]) <= self._now()

    @contextmanager
    def _temporary(self) -> Iterator[tuple[BinaryIO, Path]]:
        """Open a new temporary file, which does not outlive the block."""
        path = self._folder / f"{secrets.token_hex(16)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                yield file, path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[tuple[BinaryIO, os.stat_result]]:
        """Open a file of the folder. Raises SealError if it can't have been written here."""
        # A link must not be followed, nor a pipe waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status, most = os.fstat(file.fileno()), self._seal.sealed_bytes(self._largest)
            if not stat.S_ISREG(status.st_mode):
                raise SealError("it is not a file")
            if status.st_size > most:
                raise SealError(f"it has {status.st_size} bytes, and {most} are the most")
            yield file, status


def _unreadable(kind: Kind, error: Exception) -> ApiError:
    """Return the client's error for data that is there and can't be read, and log it."""
    logs.event("stored_unreadable", logging.WARNING, kind=kind, error=str(error))
    if isinstance(error, OSError):
        message = f"the stored {kind} can't be read now. Try again, or go on without it."
        return ApiError(503, message, "stored_unavailable", retry_after_s=RETRY_S)
    code = "stored_key_lost" if isinstance(error, UnknownKeyError) else "stored_damaged"
    return ApiError(400, f"the stored {kind} can't be used: {error}. Go on without it.", code)


def _name(own: str, secret: str, kind: Kind) -> str:
    """Return the name of a file. own: name that stands for its owner."""
    return f"{own}.{sha256(secret.encode()).hexdigest()}.{kind}"


def _size_of(path: Path) -> int:
    """Return the bytes that a file takes on the disk; 0 if it is not there."""
    try:
        return _blocks(path.stat().st_size)
    except FileNotFoundError:
        return 0


def _blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
