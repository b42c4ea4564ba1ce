"""Media files, jobs and a pool for the tests of the decoders."""

import asyncio
import io
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import soundfile
from PIL import Image

from qwen3_omni_neuron.helpers.job import MIB, Admit, Decoded, Job
from qwen3_omni_neuron.helpers.media import DecodingPool
from qwen3_omni_neuron.prompt.media.pixels import MediaSettings, Sizes
from testing.decoding_faults import MODULE
from testing.media_cases import noise_image
from testing.subprocesses import children

LONG_S = 60.0  # for what takes a moment, on a machine that does other things
MEDIA = MediaSettings(16000, 12.5, Sizes(16, 2, 2, 3136, 12_845_056))
Result = TypeVar("Result")


def sound(form: str, subtype: str, rate: int = 16000, channels: int = 1, s: float = 1.3) -> bytes:
    noise = np.random.default_rng(rate).standard_normal((round(s * rate), channels)) / 10
    file = io.BytesIO()
    soundfile.write(file, noise, rate, format=form, subtype=subtype)
    return file.getvalue()


def picture(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    (image or noise_image(150, 100)).save(file, kind, **options)
    return file.getvalue()


def grey_video(n: int, width: int, height: int) -> bytes:
    """Return a video of grey frames, a MPEG-4 of 30 frames a second."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream: Any = out.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        frame = av.VideoFrame(width, height, "yuv420p")
        for plane in frame.planes:
            plane.update(bytes([100]) * plane.buffer_size)
        for index in range(n):
            frame.pts = index
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


def job_of(kind: Any, content: bytes, **fields: Any) -> Job:
    return Job(kind, content, "here", fields.pop("media", MEDIA), **fields)


def children_of(pool: DecodingPool) -> list[int]:
    return [] if pool.pid is None else children(pool.pid)


async def until(condition: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + LONG_S
    while not (value := condition()):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    return value


class SharedPool:
    """A pool whose event loop runs in a thread, for tests that only ask for results."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.pool = DecodingPool(memory_bytes=512 * MIB, deadline_s=LONG_S, server=MODULE)

    def decode(self, job: Job, admit: Admit = lambda _: None) -> Decoded:
        return self.do(self.pool.decode("owner", job, admit))

    def do(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(3 * LONG_S)

    def close(self) -> None:
        self.do(self.pool.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
