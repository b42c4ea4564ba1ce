"""Pool of processes that decode: what a server's event loop calls."""

import asyncio
import contextlib
import itertools
import logging
import math
import mmap
import os
import signal
import socket
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.engines.process.child import describe_exit
from qwen3_omni_neuron.engines.process.nameless_file import nameless_file
from qwen3_omni_neuron.errors import BusyError, ClosedError, InputError
from qwen3_omni_neuron.serving.decoding import wire
from qwen3_omni_neuron.serving.decoding.job import (
    ERRORS,
    MIB,
    Admit,
    Decoded,
    Job,
    Measured,
    PoolSettings,
    admit_all,
)
from qwen3_omni_neuron.serving.decoding.link import ForkServer, Line
from qwen3_omni_neuron.serving.decoding.turns import Turns

logger = logging.getLogger(__name__)
FORK_SERVER = "qwen3_omni_neuron.serving.decoding.fork_server"
ATTEMPTS = 2  # of a job whose fork server ended: the job need not be to blame
PIECE_BYTES = 1 << 20  # that are copied at a time: half a millisecond of the event loop
KILL_S = 5.0  # for a child's end to be reported; a fork server that can't is ended
_CPU_TIMES = 2  # of the deadline: a video's decoder has two threads


class DecodingPool:
    """Pool of processes that decode media, one for each item, a few at a time.

    settings: its limits. server: module of the fork server. Used by one event loop, from its first
    `start` or `decode` on. A fork server that ends is started anew with the next job.
    """

    def __init__(self, settings: PoolSettings | None = None, server: str = FORK_SERVER):
        self._settings, self._module = settings or PoolSettings(), server
        self._turns = Turns(self._settings.decoders)
        self._numbers = itertools.count(1)
        self._server: ForkServer | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The id of the fork server's process; None where there is none."""
        return None if self._server is None or self._server.ended else self._server.pid

    def start(self) -> None:
        """Start the fork server, so that the first item need not wait for it.

        Called in the event loop. Raises OSError where it can't be started, ClosedError.
        """
        self._running_server()

    async def decode(self, owner: str, job: Job, admit: Admit = admit_all) -> Decoded:
        """Decode a media file in a process of its own.

        owner: who it is for; owners take turns. admit: called with the item's sizes before it is
        decoded, and once more where it turns out larger than its header says; what it raises ends
        the job. Cancelling the task kills the process.
        Raises AudioError, ImageError, VideoError or PromptTooLongError as the API does for the same
        file; one of the first three also where decoding takes more memory or time than is allowed,
        or crashes. Raises BusyError where no process can be had, OptionError for options of more
        than 4 KiB, ClosedError after `close`.
        """
        for _ in range(ATTEMPTS):
            with contextlib.suppress(_ServerEndedError):
                return await self._decode(owner, job, admit)
        self._refuse_where_closed()
        raise _undecodable(job, "the process that starts decoders was ended")

    async def close(self) -> None:
        """End every job with a ClosedError, and the processes."""
        self._closed = True
        # Those that run end with it, and those that wait for a place when they get it.
        if self._server is not None:
            await self._server.close()

    async def _decode(self, owner: str, job: Job, admit: Admit) -> Decoded:
        self._refuse_where_closed()
        await self._turns.take(owner)
        child = None
        try:
            child = await self._start(job)
            # The place is free when the process has ended, not when nobody waits for it any more.
            child.exited.add_done_callback(lambda _: self._turns.give_back(owner))
            return await _attend(child, job, admit)
        finally:
            if child is None:
                self._turns.give_back(owner)
            else:
                child.give_up()

    async def _start(self, job: Job) -> "_Child":
        try:
            with nameless_file() as content:
                await _write(content, job.content)
                server = self._running_server()
                return _Child(server, next(self._numbers), self._settings, job, content)
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
    """Process that decodes one item, as the pool has it.

    exited: how it ended, as ForkServer.fork has it. result: file for what it decodes. late: it
    was killed since its deadline had passed.
    """

    def __init__(
        self, server: ForkServer, number: int, settings: PoolSettings, job: Job, content: BinaryIO
    ):
        self.settings, self.late = settings, False
        self._server, self._number = server, number
        self._loop = asyncio.get_running_loop()
        message = wire.job_message(job)
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
        """Seconds of processors' time that it may take."""
        return math.ceil(_CPU_TIMES * self.settings.deadline_s)

    async def answer(self, name: str) -> Any:
        """Wait for its next message, which has to be of this name; return what it says.

        Raises the InputError that it has sent instead, BrokenAnswerError, _ServerEndedError, and
        _EndedError.
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
        """Let it go on."""
        self._line.send(wire.GO)

    async def end(self) -> None:
        """Wait until it has ended. Raises _EndedError unless it did so in order."""
        status = await self._status()
        if status:
            raise _EndedError(status)

    def give_up(self) -> None:
        """Kill it, if it runs, and close the files."""
        self._line.end()
        self.result.close()
        if not self.exited.done():
            self._kill()

    def output(self) -> str:
        """Return the end of what it and others have printed, for the log."""
        return self._server.output()

    async def _status(self) -> int:
        # Shielded: the pool has to learn how it ended also where nobody waits any more.
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
        if exited.result() is None:  # its end of the connection may be open for ever
            self._line.end()


class _EndedError(Exception):
    """A child has ended without a result, or not in order."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


async def _attend(child: _Child, job: Job, admit: Admit) -> Decoded:
    """Lead a child through its job."""
    try:
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
        return Decoded(await _item(job, holding, child.result), made)
    except wire.BrokenAnswerError as error:
        logger.warning("a decoder's answer is refused: %s. %s", error, child.output())
        raise _undecodable(job, "its decoder gave no proper answer") from error
    except _EndedError as error:
        raise _failure(child, job, error.status) from error


def _measured(job: Job, holding: wire.Holding, pixels: int) -> Measured:
    """Return the sizes of a result as it is. pixels: of the picture in the file."""
    heard_s = holding.samples / job.media.audio_rate
    seen_s = holding.frames / holding.fps if job.kind == "video" else 0.0
    return Measured(max(heard_s, seen_s), pixels, holding.size)


async def _item(job: Job, holding: wire.Holding, result: BinaryIO) -> dict[str, Any]:
    """Read a result, and make the item of it."""
    shape = (holding.frames, holding.height, holding.width, 3)
    pixels = (await _read(result, holding.pixel_bytes)).reshape(shape)
    samples = (await _read(result, 4 * holding.samples)).view(np.float32)
    sound = {"audio": samples, "sampling_rate": job.media.audio_rate} if holding.samples else {}
    if job.kind == "audio":
        return {"type": "audio", **sound}
    if holding.fitted:  # the API's own resizing changes nothing then
        limits = dict.fromkeys(("min_pixels", "max_pixels"), holding.height * holding.width)
    else:
        limits = {n: job.options[n] for n in ("min_pixels", "max_pixels") if n in job.options}
    if job.kind == "image":
        return {"type": "image", "image": pixels[0], **limits}
    return {"type": "video", "video": pixels, "fps": holding.fps, **limits, **sound}


async def _write(file: BinaryIO, content: bytes) -> None:
    """Write a file, and let others go on meanwhile."""
    left = memoryview(content)
    while left:
        left = left[file.write(left[:PIECE_BYTES]) :]
        await asyncio.sleep(0)


async def _read(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    """Read so many bytes from where a file is, and let others go on meanwhile.

    They are copied: a mapping of the file would keep a descriptor open for as long as the array
    lives, and whoever else has the file could cut it, which kills a process that reads there.
    Raises BrokenAnswerError where there are fewer.
    """
    if not size:
        return np.empty(0, np.uint8)
    # Pages of its own, which are the system's again as soon as the array is garbage.
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
    if status == wire.NO_FORK:
        return _no_process(job, "the system gives no more processes")
    if child.late:
        return _undecodable(job, f"its decoder needed more than {settings.deadline_s:g} s")
    if status == -signal.SIGXCPU:
        why = f"its decoder needed more than {child.cpu_s} s of processors' time"
        return _undecodable(job, why)
    if status == wire.OUT_OF_MEMORY:
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
