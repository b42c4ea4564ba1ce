"""Pool of decoding processes, for a server's event loop."""

import asyncio
import contextlib
import itertools
import logging
import math
import mmap
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.engines.process.child import describe_exit, nameless_file
from qwen3_omni_neuron.errors import BusyError, ClosedError, InputError
from qwen3_omni_neuron.helpers import orders
from qwen3_omni_neuron.helpers.fair_places import FairPlaces
from qwen3_omni_neuron.helpers.link import ForkServer
from qwen3_omni_neuron.helpers.media import wire
from qwen3_omni_neuron.helpers.media.job import (
    ERRORS,
    MIB,
    Admit,
    Decoded,
    Job,
    Measured,
    PoolSettings,
    admit_all,
)
from qwen3_omni_neuron.helpers.media.line import Line
from qwen3_omni_neuron.prompt.media.sizes import SIZE_FIELDS, VisualSize

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
FORK_SERVER = "qwen3_omni_neuron.helpers.media.server"
ATTEMPTS = 2  # attempts at a job if the fork server ended, perhaps for another reason
PIECE_BYTES = 1 << 20  # bytes copied at a time: half a millisecond of the event loop
KILL_S = 5.0  # time to report a child's end; after it the fork server is ended
_CPU_TIMES = 2  # CPU time limit over deadline: a video's decoder has two threads


class DecodingPool:
    """Pool of processes that decode media, one for each item, a few at a time.

    settings: its limits. server: module of the fork server. Used by one event loop, from the first
    `start` or `decode` on. If the fork server ends, the next job starts a new one.
    """

    def __init__(self, settings: PoolSettings | None = None, server: str = FORK_SERVER):
        self._settings, self._module = settings or PoolSettings(), server
        self._places = FairPlaces(self._settings.decoders)
        self._numbers = itertools.count(1)
        self._server: ForkServer | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The id of the fork server's process; None where there is none."""
        return None if self._server is None or self._server.ended else self._server.pid

    def start(self) -> None:
        """Start the fork server, so that the first item need not wait for it.

        Called in the event loop. Raises ClosedError, and OSError if it can't be started.
        """
        self._running_server()

    async def decode(self, owner: str, job: Job, admit: Admit = admit_all) -> Decoded:
        """Decode a media file in a process of its own.

        owner: the owner of the job; owners take turns. admit: called with the item's sizes before
        decoding, and again if the item is larger than its header says; an error that it raises
        ends the job. Cancelling the task kills the process.
        Raises AudioError, ImageError, VideoError or PromptTooLongError as the API does for the same
        file; one of the first three also where decoding takes more memory or time than is allowed,
        or crashes. Raises BusyError where no process can be had, OptionError for options of more
        than 4 KiB, ClosedError after `close`.
        """
        return await self._work(owner, job, lambda child: _attend(child, job, admit))

    async def measure(self, owner: str, job: Job) -> VisualSize:
        """Read the size of an image or video in a process of its own, without decoding it.

        Raises the errors of `decode`.
        """
        return await self._work(owner, job, lambda child: _attend_size(child, job), True)

    async def close(self) -> None:
        """End every job with a ClosedError, and the processes."""
        self._closed = True
        # Running jobs end with the fork server, and waiting jobs end when they get a place.
        if self._server is not None:
            await self._server.close()

    async def _work(
        self,
        owner: str,
        job: Job,
        attend: "Callable[[_Child], Coroutine[Any, Any, _Result]]",
        size_alone: bool = False,
    ) -> "_Result":
        """Run a job once a place is free. attend: exchanges messages with its process."""
        for _ in range(ATTEMPTS):
            with contextlib.suppress(_ServerEndedError):
                return await self._attempt(owner, job, attend, size_alone)
        self._refuse_where_closed()
        raise _undecodable(job, "the process that starts decoders was ended")

    async def _attempt(
        self,
        owner: str,
        job: Job,
        attend: "Callable[[_Child], Coroutine[Any, Any, _Result]]",
        size_alone: bool,
    ) -> "_Result":
        self._refuse_where_closed()
        await self._places.take(owner)
        child = None
        try:
            child = await self._start(job, size_alone)
            # The place is free when the process has ended, even if the caller stopped waiting.
            child.exited.add_done_callback(lambda _: self._places.give_back(owner))
            return await _checked(child, job, attend)
        finally:
            if child is None:
                self._places.give_back(owner)
            else:
                child.give_up()

    async def _start(self, job: Job, size_alone: bool) -> "_Child":
        try:
            with nameless_file() as content:
                await _write(content, job.content)
                message = wire.job_message(job, size_alone)
                server = self._running_server()
                return _Child(server, next(self._numbers), self._settings, message, content)
        except OSError as error:
            raise _no_process(job, str(error)) from error

    def _running_server(self) -> ForkServer:
        self._refuse_where_closed()
        if self._server is None or self._server.ended:
            self._server = ForkServer(self._module)
        return self._server

    def _refuse_where_closed(self) -> None:
        if self._closed:
            raise _closed()


class _ServerEndedError(Exception):
    """The fork server has ended before the child did."""


class _Child:
    """The pool's side of a process that decodes one item.

    exited: its return code, see ForkServer.fork. result: file for the decoded data. late: it was
    killed because its deadline had passed.
    """

    def __init__(
        self,
        server: ForkServer,
        number: int,
        settings: PoolSettings,
        message: bytes,
        content: BinaryIO,
    ):
        self.settings, self.late = settings, False
        self._server, self._number = server, number
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.result = nameless_file()
            except BaseException:
                ours.close()
                raise
            self._line = Line(ours)
            self._line.send(message)
            files = (theirs.fileno(), content.fileno(), self.result.fileno())
            self.exited = server.fork(number, settings.memory_bytes, self.cpu_s, files)
        self._timer = self._loop.call_later(settings.deadline_s, self._expire)
        self.exited.add_done_callback(self._on_exit)

    @property
    def cpu_s(self) -> int:
        """CPU time limit in seconds."""
        return math.ceil(_CPU_TIMES * self.settings.deadline_s)

    async def answer(self, name: str) -> Any:
        """Wait for the next message, which must have this name, and return its value.

        Raises the InputError that the child sent instead, BrokenAnswerError, _ServerEndedError,
        and _EndedError.
        """
        message = await self._line.receive()
        if message is None:
            raise _EndedError(await self._status())
        if "error" in message:
            raise wire.refusal_of(message["error"])
        if name not in message:
            raise wire.BrokenAnswerError(f"it is no {name}")
        return message[name]

    def go_on(self) -> None:
        """Let the child continue."""
        self._line.send(wire.GO)

    async def end(self) -> None:
        """Wait until the child has ended. Raises _EndedError unless its status is 0."""
        status = await self._status()
        if status:
            raise _EndedError(status)

    def give_up(self) -> None:
        """Kill the child if it runs, and close the files."""
        self._line.end()
        self.result.close()
        if not self.exited.done():
            self._kill()

    def output(self) -> str:
        """Return the last output of the fork server and all children, for the log."""
        return self._server.output()

    async def _status(self) -> int:
        # Shielded: the pool needs the child's end also when the caller stops waiting.
        status = await asyncio.shield(self.exited)
        if status is None:
            raise _ServerEndedError
        return status

    def _expire(self) -> None:
        self.late = True
        self._kill()

    def _kill(self) -> None:
        self._timer.cancel()
        why = f"did not end a child within {KILL_S:g} s"
        self._timer = self._loop.call_later(KILL_S, self._server.end, why)
        self._server.kill(self._number)

    def _on_exit(self, exited: "asyncio.Future[int | None]") -> None:
        self._timer.cancel()
        if exited.result() is None:  # the child's end of the connection may stay open for ever
            self._line.end()


class _EndedError(Exception):
    """A child has ended without a result, or with a nonzero status."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


async def _checked(
    child: _Child, job: Job, attend: "Callable[[_Child], Coroutine[Any, Any, _Result]]"
) -> "_Result":
    """Attend to a child. Raises the job's errors for a child that breaks off."""
    try:
        return await attend(child)
    except wire.BrokenAnswerError as error:
        logger.warning("a decoder's answer is refused: %s. %s", error, child.output())
        raise _undecodable(job, "its decoder gave no proper answer") from error
    except _EndedError as error:
        raise _failure(child, job, error.status) from error


async def _attend(child: _Child, job: Job, admit: Admit) -> Decoded:
    """Run a child's job: admit its sizes, and read its result."""
    measured = wire.measured_of(await child.answer("measured"))
    admit(measured)
    child.go_on()
    holding = wire.holding_of(await child.answer("holds"), job.kind)
    if holding.size > child.settings.memory_bytes:
        raise wire.BrokenAnswerError("its result is larger than its memory")
    made = _measured(job, holding, measured.pixels)
    if made.size > measured.size:
        admit(made)
    os.ftruncate(child.result.fileno(), holding.size)
    child.go_on()
    await child.end()
    item = await _item(job, holding, child.result)
    return Decoded(item, made, holding.warnings)


async def _attend_size(child: _Child, job: Job) -> VisualSize:
    """Read the size that a child has found."""
    size = wire.size_of(await child.answer("shape"), job)
    await child.end()
    return size


def _measured(job: Job, holding: wire.Holding, pixels: int) -> Measured:
    """Return the actual sizes of a result. pixels: pixels of the picture in the file."""
    heard_s = holding.samples / job.media.audio_rate
    seen_s = holding.frames / holding.fps if job.kind == "video" else 0.0
    return Measured(max(heard_s, seen_s), pixels, holding.size)


async def _item(job: Job, holding: wire.Holding, result: BinaryIO) -> dict[str, Any]:
    """Read a result, and return it as a message's item."""
    shape = (holding.frames, holding.height, holding.width, 3)
    pixels = (await _read(result, holding.pixel_bytes)).reshape(shape)
    samples = (await _read(result, 4 * holding.samples)).view(np.float32)
    sound = {"audio": samples, "sampling_rate": job.media.audio_rate} if holding.samples else {}
    if job.kind == "audio":
        return {"type": "audio", **sound}
    if holding.fitted:  # these limits keep the API from resizing it again
        limits = dict.fromkeys(("min_pixels", "max_pixels"), holding.height * holding.width)
    else:
        limits = {n: job.options[n] for n in SIZE_FIELDS if n in job.options}
    if job.kind == "image":
        return {"type": "image", "image": pixels[0], **limits}
    return {"type": "video", "video": pixels, "fps": holding.fps, **limits, **sound}


async def _write(file: BinaryIO, content: bytes) -> None:
    """Write a file in pieces, and let other tasks run between them."""
    left = memoryview(content)
    while left:
        left = left[file.write(left[:PIECE_BYTES]) :]
        await asyncio.sleep(0)


async def _read(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    """Read `size` bytes from a file's position in pieces, and let other tasks run between them.

    The bytes are copied: a mapping would keep a descriptor open for as long as the array lives,
    and another process could truncate the file, which kills a process that reads the mapping.
    Raises BrokenAnswerError if there are fewer bytes.
    """
    if not size:
        return np.empty(0, np.uint8)
    # Private pages, which return to the system as soon as the array is freed.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view, at = memoryview(memory), 0
    while at < size:
        count = file.readinto(view[at : at + PIECE_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise wire.BrokenAnswerError("its result is cut short")
        at += count
        await asyncio.sleep(0)
    return np.frombuffer(memory, np.uint8)


def _failure(child: _Child, job: Job, status: int) -> Exception:
    """Return the error of a child that ended without a result."""
    settings = child.settings
    if status == orders.NO_FORK:
        return _no_process(job, "the system gives no more processes")
    if child.late:
        return _undecodable(job, f"its decoder needed more than {settings.deadline_s:g} s")
    if status == -signal.SIGXCPU:
        why = f"its decoder needed more than {child.cpu_s} s of processors' time"
        return _undecodable(job, why)
    if status == orders.OUT_OF_MEMORY:
        mib = settings.memory_bytes // MIB
        return _undecodable(job, f"its decoder needed more than {mib} MiB of memory")
    how = describe_exit(status)
    logger.warning("a decoder of %s %s. %s", job.kind, how, child.output())
    return _undecodable(job, f"its decoder {how}")


def _undecodable(job: Job, why: str) -> InputError:
    return ERRORS[job.kind](
        f"{job.where} can't be decoded: {why}. Send it in another format, or smaller."
    )


def _no_process(job: Job, why: str) -> BusyError:
    return BusyError(f"{job.where} can't be decoded now: {why}. Send it again later.")


def _closed() -> ClosedError:
    return ClosedError("the pool of decoders was closed.")
