"""Decoding of media for a server's event loop, in processes of their own if they need a codec."""

import asyncio
import contextlib
import io
import logging
import math
import mmap
import os
import pickle
import wave
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import printable
from qwen3_omni_neuron.helpers import wire
from qwen3_omni_neuron.helpers.job import ERRORS, MIB, Admit, Decoded, Job, Measured
from qwen3_omni_neuron.helpers.media_work import read_audio
from qwen3_omni_neuron.helpers.pool import Child, ChildError, Limits, Pool
from qwen3_omni_neuron.prompt.media.pixels import SIZE_FIELDS

logger = logging.getLogger(__name__)
FORK_SERVER = "qwen3_omni_neuron.helpers.media_work"
PIECE_BYTES = MIB  # copied at a time: half a millisecond of the event loop
MOST_INLINE_BYTES = 4 * MIB  # 131 s of 16 kHz; at the lowest rate it becomes 16 MiB
_LEAST_RATE, _MOST_RATE = 8000, 192_000  # Hz; a lower one would become many more samples
_MOST_CHANNELS = 8


class DecodingPool(Pool):
    """Pool of processes that decode media, one per item, a few at a time.

    decoders: concurrent processes. memory_bytes, deadline_s: see Limits; CPU time has the same
    limit. server: module of the fork server.
    """

    def __init__(
        self,
        decoders: int = 2,
        memory_bytes: int = 1024 * MIB,
        deadline_s: float = 30.0,
        server: str = FORK_SERVER,
    ):
        limits = Limits(memory_bytes, math.ceil(deadline_s), deadline_s)
        super().__init__(server, "decoder", limits, decoders)

    async def decode(self, owner: str, job: Job, admit: Admit = lambda _: None) -> Decoded:
        """Decode a media file in its own process, which ends when the task is cancelled.

        owner: owners take turns. admit: called with the item's sizes before decoding, and again if
        it is larger than its header states; its error ends the job.
        Raises the API's errors, also if decoding exceeds a limit or crashes; BusyError if no
        process is available, ClosedError after `close`.
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
                raise ChildError("sent a result larger than its memory")
            if made.size > measured.size:
                admit(made)
            os.ftruncate(child.result.fileno(), made.size)
            child.go_on()
            await child.end()
            item = await _item(job, shape, samples, fps, bool(fitted), child.result)
            warnings = [printable(w, wire.MOST_CHARACTERS) for w in answer.text.split("\n") if w]
            return Decoded(item, tuple(warnings))

    @contextlib.asynccontextmanager
    async def _decoder(self, owner: str, job: Job) -> AsyncIterator[Child]:
        more = job.content if isinstance(job.content, bytes) else b""
        head = pickle.dumps(replace(job, content=b"") if more else job)
        try:
            async with self.places.place(owner), self.child(head, more=more) as child:
                yield child
                child.close()
        except ChildError as error:
            logger.warning("a decoder %s. %s", error, self.output())
            raise ERRORS[job.kind](
                f"{job.where} can't be decoded: its decoder {error}. Send another format, or a "
                "smaller file."
            ) from error


def _measured(job: Job, shape: tuple[int, ...], samples: int, fps: float, pixels: int) -> Measured:
    """Return a result's actual sizes. Raises ChildError for impossible ones.

    shape: its pixels' shape. pixels: number in the file's image.
    """
    frames, size = shape[0], math.prod(shape)
    wrong = {
        "audio": size or not samples,
        "image": frames != 1 or not size or samples,
        "video": not size or not fps,
    }
    if wrong[job.kind]:
        raise ChildError(f"sent a result that is not {job.kind}")
    heard_s = samples / job.media.audio_rate
    seen_s = frames / fps if job.kind == "video" else 0.0
    return Measured(max(heard_s, seen_s), pixels, size + 4 * samples)


async def _item(
    job: Job, shape: tuple[int, ...], samples: int, fps: float, fitted: bool, file: BinaryIO
) -> dict[str, Any]:
    pixels = (await _read(file, math.prod(shape))).reshape(shape)
    heard = (await _read(file, 4 * samples)).view(np.float32)
    sound = {"audio": heard, "sampling_rate": job.media.audio_rate} if samples else {}
    if job.kind == "audio":
        return {"type": "audio", **sound}
    if fitted:  # these limits stop the API from resizing it again
        limits = dict.fromkeys(("min_pixels", "max_pixels"), shape[1] * shape[2])
    else:
        limits = {n: job.options[n] for n in SIZE_FIELDS if n in job.options}
    if job.kind == "image":
        return {"type": "image", "image": pixels[0], **limits}
    return {"type": "video", "video": pixels, "fps": fps, **limits, **sound}


async def _read(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    """Read `size` bytes from a file, while other tasks run. Raises ChildError.

    Copies them: a mapping would keep the file open, and its truncation would kill this process.
    """
    if not size:
        return np.empty(0, np.uint8)
    # Private pages, which are freed with the array.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view, at = memoryview(memory), 0
    while at < size:
        count = file.readinto(view[at : at + PIECE_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise ChildError("truncated its result")
        at += count
        await asyncio.sleep(0)
    return np.frombuffer(memory, np.uint8)


def decode_inline(job: Job, admit: Admit = lambda _: None) -> Decoded | None:
    """Decode a small WAV of 16-bit PCM in milliseconds; None for all else: see the pool.

    admit: see DecodingPool.decode. Raises AudioError or PromptTooLongError.
    """
    content = job.content
    found = _samples(content) if job.kind == "audio" and isinstance(content, bytes) else None
    if found is None:
        return None
    samples, rate = found
    warnings: list[str] = []
    given = {**job.options, "audio": samples, "sampling_rate": rate}
    made = read_audio(job, given, admit, warnings.append)
    item = {"type": "audio", "audio": made, "sampling_rate": job.media.audio_rate}
    return Decoded(item, tuple(warnings))


def _samples(content: bytes) -> tuple[NDArray[np.int16], int] | None:
    whole = int.from_bytes(content[4:8], "little") + 8 == len(content) <= MOST_INLINE_BYTES
    if not whole or content[12:16] != b"fmt " or content[20:22] != b"\1\0":  # WAVE_FORMAT_PCM
        return None
    try:
        with wave.open(io.BytesIO(content)) as file:
            form, data = file.getparams(), file.readframes(file.getnframes())
    except (wave.Error, EOFError):
        return None
    channels, rate, frames = form.nchannels, form.framerate, form.nframes
    frame_bytes = int.from_bytes(content[32:34], "little")
    usual = form.sampwidth == 2 and channels <= _MOST_CHANNELS and frame_bytes == 2 * channels
    if not usual or not _LEAST_RATE <= rate <= _MOST_RATE or len(data) != 2 * frames * channels:
        return None
    if frames <= channels:  # would be read as [channels, samples]
        return None
    return np.frombuffer(data, "<i2").reshape(frames, channels), rate
