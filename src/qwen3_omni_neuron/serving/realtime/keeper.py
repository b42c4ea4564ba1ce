"""Keeping of one session in the session folder, from one rest to the next, and resuming another."""

import asyncio
import secrets
import time
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from contextlib import suppress

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.errors import MessageError, StoredSessionError
from qwen3_omni_neuron.prompt.stored import Document, packed, unpack
from qwen3_omni_neuron.serving.openai.errors import RETRY_S, ApiError
from qwen3_omni_neuron.serving.realtime.connection import Connection
from qwen3_omni_neuron.serving.settings import longest_life_s
from qwen3_omni_neuron.serving.stored.folder import NotKeptError

STORED_KIND = "realtime session of form 2"
"""Kind of document that is written; see prompt.stored. Form 1 had items apart from the turns."""
LAST_S = 10.0
"""Time for the last write of a session that ends."""
POLL_S = 1.0
"""Interval at which an open session looks whether another server has resumed it."""
_WRITTEN = "written_s"  # field of the document: time of writing, since 1970
_COPIES = 2  # a session that is read is in memory twice: as one piece, and as arrays

Version = tuple[int, int]
"""Numbers of a session's changes: another version has other content."""


class SessionKeeper:
    """Writes one session to the session folder whenever it rests, so that it can be resumed.

    The session's client resumes it with a token of 256 random bits, of which the folder has a hash
    alone. A token is good once: a session that was resumed has the new connection's, and the
    connection that it was taken from is told so and ends. For one event loop; without a folder
    nothing is done.

    token: the client's token, None where the session can't be resumed. told: the token that the
    client was told of last. wanted: set once another connection resumes this session.
    """

    def __init__(
        self, connection: Connection, omni: Qwen3Omni, keepers: "MutableMapping[str, SessionKeeper]"
    ):
        """keepers: the keepers of the server's open sessions, by their tokens."""
        self._connection, self._omni, self._keepers = connection, omni, keepers
        self._folder = connection.service.folder
        self._owner = connection.context.owner
        self._secret = secrets.token_urlsafe(32)
        self.token = self.told = None if self._folder is None else self._secret
        self.wanted, self._closed = asyncio.Event(), asyncio.Event()
        self._seen: Version = (0, 0)
        self._tried: Version = (0, 0)  # the last one that was written, or could not be
        self._is_there = False  # the folder has a file of it
        self._forgotten = self._deleted = False
        self._task: asyncio.Task[None] | None = None
        self._written_s, self._touch_s = 0.0, connection.service.settings.kept_session_s / 2
        if self._folder is not None:
            keepers[self._secret] = self

    @property
    def keeps(self) -> bool:
        """True where the session is kept in a folder, or will be."""
        return self._folder is not None and not self._forgotten

    def look(self, version: Version, document: Callable[[], Document]) -> None:
        """Begin to write the session if it has changed, and has not since the last look.

        To be called every moment in which no response is made and the user does not speak.
        document: returns the session's content, in its thread.
        """
        if not self.keeps or (self._task is not None and not self._task.done()):
            return
        if self._seen == version != self._tried:
            self._task = asyncio.create_task(self._write(version, document))
        elif time.monotonic() - self._written_s > self._touch_s:
            self._touch()  # the time of an open session is not over
        self._seen = version

    async def close(self, version: Version, document: Callable[[], Document]) -> None:
        """Write what has changed. The session can be resumed for kept_session_s from now on."""
        try:
            if self._task is not None:
                await asyncio.wait((self._task,), timeout=LAST_S)
                self._task = None
            if self.keeps and version != self._tried:
                last = asyncio.create_task(self._write(version, document))
                await asyncio.wait((last,), timeout=LAST_S)  # a later one is written, too
            else:
                self._touch()
        finally:
            self._keepers.pop(self._secret, None)
            self._closed.set()

    async def forget(self) -> None:
        """Remove the session from the folder, and keep it no longer. Raises OSError."""
        self._forgotten, self._deleted, self.token = True, True, None
        if self._folder is not None:
            await asyncio.wrap_future(self._folder.later(self._delete))

    async def taken(self) -> None:
        """Wait until another connection resumes this session, here or at another server."""
        while not self.wanted.is_set():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.wanted.wait(), POLL_S)
            if self._folder is None or self._deleted:
                continue
            used = self._folder.later(self._folder.is_used, self._owner, self._secret)
            if await asyncio.wrap_future(used):
                self._forgotten, self.token = True, None
                return

    async def stored(self, token: str) -> Document:
        """Return the content of the session that a token resumes, which is used now.

        `resumed` or `not_resumed` has to follow. Raises ApiError; then the token is as it was.
        """
        if token == self._secret:
            message = "this is the token of this session itself. Go on with it."
            raise ApiError(400, message, "session_not_found", "resume_token")
        other = self._keepers.get(token)
        if other is not None and other._owner == self._owner and other is not self:
            other.wanted.set()  # its connection is lost, which this server may not know yet
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(other._closed.wait(), 2 * LAST_S)
        resumes = self._connection.service.metrics.resumes
        try:
            found = await self._connection.in_thread(self._read, token)
        except ApiError as error:
            resumes.labels(error.code).inc()
            raise
        resumes.labels("resumed").inc()
        return found

    async def resumed(self, token: str, version: Version, document: Callable[[], Document]) -> None:
        """Write the session that a token has resumed, which is of no use any more."""
        await self._write(version, document)
        if self._folder is not None and self._is_there:
            self._folder.later(self._remove, token)

    def not_resumed(self, token: str) -> None:
        """Let a token be used again whose session could not be restored."""
        if self._folder is not None:
            self._folder.later(self._folder.unuse, self._owner, token)

    async def _write(self, version: Version, document: Callable[[], Document]) -> None:
        """Write the session, and note in `token` whether it can be resumed."""
        before, self._tried = self._tried, version
        put: Future[None] | None = None
        try:
            content = await self._connection.in_thread(document)
            if self._folder is None or self._forgotten:
                return
            put = self._folder.later(self._put, content, self._is_there)
            del content
            await asyncio.shield(asyncio.wrap_future(put))
        except MessageError:  # a turn or a reply has begun since: it does not rest
            self._tried = before
        except NotKeptError as error:
            self._failed(error)
        except Exception as error:
            self._connection.failed(error)  # it is logged
            self._failed(NotKeptError("failed", "the log says why, under the session's request"))
        else:
            self._is_there, self._written_s = True, time.monotonic()
            self.token = None if self._forgotten else self._secret
        finally:
            del put  # breaks the reference cycle through its error

    def _failed(self, error: NotKeptError) -> None:
        """Note that the session can't be resumed."""
        self._connection.service.metrics.failed_to_keep("session", error)
        self.token = None
        self._forgotten = self._forgotten or error.reason == "gone"
        if self._folder is not None and self._is_there:  # it lacks what came since
            self._folder.later(self._remove, self._secret)
        self._is_there = False

    def _touch(self) -> None:
        if self._folder is not None and self._is_there:
            self._folder.later(self._folder.touch, "session", self._owner, self._secret)
            self._written_s = time.monotonic()

    # The folder's thread.

    def _put(self, content: Document, replaces: bool) -> None:
        assert self._folder is not None
        if self._folder.is_used(self._owner, self._secret):
            raise NotKeptError("gone", "another connection has resumed it")
        dated = {**content, _WRITTEN: time.time()}
        try:
            parts = packed(STORED_KIND, self._omni.checkpoint_fingerprint, dated)
        except StoredSessionError as error:
            raise NotKeptError("content", str(error)) from error
        self._folder.put("session", self._owner, self._secret, parts, replaces)

    def _delete(self) -> None:
        assert self._folder is not None
        self._folder.use(self._owner, self._secret)
        self._remove(self._secret)

    def _remove(self, token: str) -> None:
        assert self._folder is not None
        self._folder.remove("session", self._owner, token)

    # The session's thread.

    def _read(self, token: str) -> Document:
        """Return the content of a stored session. Raises ApiError."""
        if self._folder is None:
            message = "this server keeps no sessions: it has no session folder. Begin anew."
            raise ApiError(400, message, "unsupported", "resume_token")
        held, taken = self._connection.service.held, list[int]()

        def hold(size: int) -> None:
            held.take(self._owner, _COPIES * size)
            taken.append(_COPIES * size)

        try:
            data = self._folder.get("session", self._owner, token, hold)
            if data is None:
                raise _not_found()
            fingerprint = self._omni.checkpoint_fingerprint
            found = unpack(data, STORED_KIND, fingerprint, "the stored session")
            # A file may have been put back, whose note is gone after this time.
            oldest_s = time.time() - longest_life_s(self._connection.service.settings)
            if found.pop(_WRITTEN, 0.0) < oldest_s or not self._folder.use(self._owner, token):
                raise _not_found()
            return found
        except OSError as error:
            message = "the session folder can't be written to now. Try again."
            raise ApiError(
                503, message, "stored_unavailable", "resume_token", retry_after_s=RETRY_S
            ) from error
        except StoredSessionError as error:
            raise ApiError(400, str(error), "stored_unusable", "resume_token") from error
        finally:
            held.give_back(self._owner, sum(taken))


def _not_found() -> ApiError:
    return ApiError(
        400,
        "there is no session that this token resumes: it has expired, was resumed or deleted, or "
        "never was. Begin anew.",
        "session_not_found",
        "resume_token",
    )
