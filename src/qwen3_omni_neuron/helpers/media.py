"""Decoding of media that need a codec, each in a process of its own, for a server's event loop."""

import asyncio
import contextlib
import logging
import math
import mmap
import os
import pickle
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import printable
from qwen3_omni_neuron.helpers import wire
from qwen3_omni_neuron.helpers.job import (
    ERRORS,
    MIB,
    Admit,
    Decoded,
    Job,
    Measured,
    admit_all,
)
from qwen3_omni_neuron.helpers.pool import PIECE_BYTES, Child, ChildError, Limits, Pool
from qwen3_omni_neuron.prompt.media.pixels import SIZE_FIELDS

logger = logging.getLogger(__name__)
FORK_SERVER = "qwen3_omni_neuron.helpers.media_work"
_CPU_TIMES = 2  # CPU time limit over deadline: a video's decoder has two threads


class DecodingPool(Pool):
    """Pool of processes that decode media, one for each item, a few at a time.

    decoders: processes at a time. memory_bytes, deadline_s: see Limits; the limit of CPU time is
    twice the deadline. server: module of the fork server.
    """

    def __init__(
        self,
        decoders: int = 2,
        memory_bytes: int = 1024 * MIB,
        deadline_s: float = 30.0,
        server: str = FORK_SERVER,
    ):
        limits = Limits(memory_bytes, math.ceil(_CPU_TIMES * deadline_s), deadline_s)
        super().__init__(server, "decoder", limits, decoders)

    async def decode(self, owner: str, job: Job, admit: Admit = admit_all) -> Decoded:
        """Decode a media file in a process of its own, which ends when the task is cancelled.

        owner: owners take turns. admit: called with the item's sizes before decoding, and again if
        it is larger than its header says; an error that it raises ends the job.
        Raises the API's errors for the same file, also if decoding exceeds a limit or crashes;
        BusyError if no process is available, ClosedError after `close`.
        """
        async with self._decoder(owner, job) as child:
            seconds, pixels, size, *_ = (await child.answer(wire.MEASURED)).numbers
            measured = Measured(seconds, int(pixels), int(size))
            admit(measured)
            child.go_on()
            answer = await child.answer(wire.HOLDS)
            frames, height, width, samples, *_ = answer.whole
            fps, fitted = answer.numbers[4:]
            shape = frames, height, width, 3
            made = _measured(job, shape, samples, fps, measured.pixels)
            if made.size > self.limits.memory_bytes:
                raise ChildError("sent a result that is larger than its memory")
            if made.size > measured.size:
                admit(made)
            os.ftruncate(child.result.fileno(), made.size)
            child.go_on()
            await child.end()
            item = await _item(job, shape, samples, fps, bool(fitted), child.result)
            warnings = [printable(w, wire.MOST_CHARACTERS) for w in answer.text.split("\n") if w]
            return Decoded(item, made, tuple(warnings))

    @contextlib.asynccontextmanager
    async def _decoder(self, owner: str, job: Job) -> AsyncIterator[Child]:
        """Fork a child for a job once a place is free. Converts ChildError."""
        more = job.content if isinstance(job.content, bytes) else b""
        head = pickle.dumps(replace(job, content=b"") if more else job)
        try:
            async with self.places.place(owner), self.child(head, more=more) as child:
                yield child
                child.close()
        except ChildError as error:
            logger.warning("a decoder %s. %s", error, self.output())
            raise ERRORS[job.kind](
                f"{job.where} can't be decoded: its decoder {error}. Send it in another format, or "
                "smaller."
            ) from error


def _measured(job: Job, shape: tuple[int, ...], samples: int, fps: float, pixels: int) -> Measured:
    """Return the actual sizes of a result, if it can be that of a job. Raises ChildError.

    shape: of its pixels. pixels: of the picture in the file.
    """
    frames, size = shape[0], math.prod(shape)
    wrong = {
        "audio": size or not samples,
        "image": frames != 1 or not size or samples,
        "video": not size or not fps,
    }
    if wrong[job.kind]:
        raise ChildError(f"sent a result that is no {job.kind}")
    heard_s = samples / job.media.audio_rate
    seen_s = frames / fps if job.kind == "video" else 0.0
    return Measured(max(heard_s, seen_s), pixels, size + 4 * samples)


async def _item(
    job: Job, shape: tuple[int, ...], samples: int, fps: float, fitted: bool, file: BinaryIO
) -> dict[str, Any]:
    """Read a result, and return it as a message's item."""
    pixels = (await _read(file, math.prod(shape))).reshape(shape)
    heard = (await _read(file, 4 * samples)).view(np.float32)
    sound = {"audio": heard, "sampling_rate": job.media.audio_rate} if samples else {}
    if job.kind == "audio":
        return {"type": "audio", **sound}
    if fitted:  # these limits keep the API from resizing it again
        limits = dict.fromkeys(("min_pixels", "max_pixels"), shape[1] * shape[2])
    else:
        limits = {n: job.options[n] for n in SIZE_FIELDS if n in job.options}
    if job.kind == "image":
        return {"type": "image", "image": pixels[0], **limits}
    return {"type": "video", "video": pixels, "fps": fps, **limits, **sound}


async def _read(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    """Read `size` bytes from a file, and let other tasks run meanwhile. Raises ChildError.

    They are copied: a mapping would keep the file open as long as the array lives, and a child
    that truncates it would kill this process.
    """
    if not size:
        return np.empty(0, np.uint8)
    # Private pages, which return to the system as soon as the array is freed.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view, at = memoryview(memory), 0
    while at < size:
        count = file.readinto(view[at : at + PIECE_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise ChildError("has cut its result short")
        at += count
        await asyncio.sleep(0)
    return np.frombuffer(memory, np.uint8)
