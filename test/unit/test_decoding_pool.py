"""The pool of decoders: its processes, deadlines and cancelled jobs, and the turns of owners."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from qwen3_omni_neuron.errors import BusyError, ClosedError, VideoError
from qwen3_omni_neuron.helpers.fair_places import FairPlaces
from qwen3_omni_neuron.helpers.media import DecodingPool
from qwen3_omni_neuron.helpers.pool import Limits
from testing.decoding_cases import LONG_S, children_of, job_of, picture, sound, until
from testing.decoding_faults import MODULE, fault
from testing.repeats import again
from testing.subprocesses import children, lives, open_files, wait_until

pytestmark = pytest.mark.anyio
LOOPS = again(("asyncio", {})), ("asyncio", {"use_uvloop": True})


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def anyio_backend(request) -> Any:
    """An event loop of either kind."""
    return request.param


@pytest.mark.usefixtures("cold_starts")
async def test_the_fork_server_is_small_and_has_one_thread() -> None:
    pool = DecodingPool()
    pool.start()
    await pool.decode("a", job_of("audio", sound("FLAC", "PCM_16")))
    open_then = open_files(pool.pid)
    for _ in range(3):
        await pool.decode("a", job_of("audio", sound("FLAC", "PCM_16")))
    await until(lambda: open_files(pool.pid) <= open_then)
    lines = Path(f"/proc/{pool.pid}/status").read_text().splitlines()
    assert "torch" not in Path(f"/proc/{pool.pid}/maps").read_text()
    await pool.close()
    status = dict(line.split(":", 1) for line in lines)
    assert int(status["Threads"]) == 1
    assert int(status["VmRSS"].split()[0]) < 100_000


async def test_a_job_that_takes_too_long_is_ended() -> None:
    pool = DecodingPool(deadline_s=0.5, server=MODULE)
    for wrong in (fault("sleep"), fault("busy")):
        with pytest.raises(VideoError, match=r"its decoder needed more than 0\.5 s"):
            await pool.decode("a", job_of("video", wrong))
        await until(lambda: not children_of(pool))
    await pool.close()


async def test_processors_time_is_limited() -> None:
    pool = DecodingPool(server=MODULE)
    pool.limits = Limits(1 << 29, 1, LONG_S)
    with pytest.raises(VideoError, match="more than 1 s of processor time"):
        await pool.decode("a", job_of("video", fault("busy")))
    await pool.close()


async def test_a_job_of_one_owner_does_not_wait_for_those_of_another() -> None:
    """Four sounds of 8 channels at 655 kHz, which take minutes, and a question."""
    wide = io.BytesIO()
    with soundfile.SoundFile(wide, "w", 655_350, 8, "PCM_16", format="FLAC") as file:
        for _ in range(60):
            file.write(np.zeros((655_350, 8), np.int16))
    pool = DecodingPool(decoders=2, deadline_s=3600.0, server=MODULE)
    held = [
        asyncio.create_task(pool.decode("bad", job_of("audio", wide.getvalue()))) for _ in range(4)
    ]
    await until(lambda: children_of(pool))
    for _ in range(3):
        decoded = await pool.decode("good", job_of("audio", sound("FLAC", "PCM_16")))
        assert len(decoded.item["audio"]) == 20_800
    assert len(children_of(pool)) == 1
    assert not any(task.done() for task in held)
    for task in held:
        task.cancel()
    await asyncio.wait(held)
    await until(lambda: not children_of(pool))
    await pool.close()


async def test_a_task_may_be_cancelled_at_any_moment() -> None:
    """After every number of steps of the event loop; the place is free each time."""
    pool = DecodingPool(decoders=1, server=MODULE)
    job = job_of("image", picture("PNG"))
    await pool.decode("a", job)
    files = open_files()
    for steps in (*range(12), *range(12, 400, 20)):
        task = asyncio.create_task(pool.decode("a", job))
        for _ in range(steps):
            await asyncio.sleep(0)
        if steps % 3 == 0:
            await asyncio.sleep(0.001 * steps / 20)
        task.cancel()
        await asyncio.wait([task])
    await asyncio.wait_for(pool.decode("b", job), LONG_S)
    await until(lambda: not children_of(pool))
    assert open_files() == files
    await pool.close()


async def test_a_fork_server_that_was_killed_is_started_anew() -> None:
    pool = DecodingPool(decoders=3, deadline_s=3600.0, server=MODULE)
    job = job_of("audio", sound("FLAC", "PCM_16"))
    await pool.decode("a", job)
    assert pool.pid is not None
    first = pool.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: not lives(first))
    assert len((await pool.decode("a", job)).item["audio"]) == 20_800
    assert pool.pid != first
    # While a job runs: its child does not stay.
    held = asyncio.create_task(pool.decode("a", job_of("audio", fault("sleep"))))
    (child,) = await until(lambda: children_of(pool))
    os.kill(pool.pid, signal.SIGKILL)
    await until(lambda: not lives(child))
    with pytest.raises(BusyError, match="the process that starts it has ended"):
        await held
    assert len((await pool.decode("a", job)).item["audio"]) == 20_800
    await pool.close()


async def test_a_fork_server_that_cannot_start_is_no_endless_wait() -> None:
    pool = DecodingPool(server="no_such_module")
    with pytest.raises(BusyError, match="the process that starts it has ended"):
        await pool.decode("a", job_of("audio", sound("FLAC", "PCM_16")))
    await pool.close()


async def test_close_ends_all_and_leaves_nothing() -> None:
    threads, files = threading.active_count(), open_files()
    before = children(os.getpid())
    pool = DecodingPool(decoders=2, deadline_s=3600.0, server=MODULE)
    jobs = [
        asyncio.create_task(pool.decode(owner, job_of("audio", fault("sleep")))) for owner in "abc"
    ]
    held = await until(lambda: len(c := children_of(pool)) == 2 and c)
    server = pool.pid
    await pool.close()
    for job in jobs:
        with pytest.raises(ClosedError):
            await job
    with pytest.raises(ClosedError):
        await pool.decode("a", job_of("audio", sound("FLAC", "PCM_16")))
    with pytest.raises(ClosedError):
        pool.start()
    await pool.close()
    assert not any(map(lives, (*held, server)))
    assert children(os.getpid()) == before
    assert open_files() == files
    assert threading.active_count() == threads


def test_all_ends_with_a_parent_that_is_killed() -> None:
    script = (
        "import asyncio\n"
        "from qwen3_omni_neuron.prompt.media.pixels import MediaSettings\n"
        "from qwen3_omni_neuron.prompt.media.pixels import Sizes\n"
        "from qwen3_omni_neuron.helpers.job import Job\n"
        "from qwen3_omni_neuron.helpers.media import DecodingPool\n"
        "from testing.decoding_faults import MODULE, fault\n"
        "from testing.subprocesses import children\n"
        "async def main():\n"
        "    pool = DecodingPool(deadline_s=3600.0, server=MODULE)\n"
        "    media = MediaSettings(16000, 12.5, Sizes(16, 2, 2, 1, 1))\n"
        "    job = Job('audio', fault('sleep'), 'here', media)\n"
        "    asyncio.create_task(pool.decode('a', job))\n"
        "    for _ in range(6000):\n"
        "        if children(pool.pid):\n"
        "            break\n"
        "        await asyncio.sleep(0.01)\n"
        "    print(pool.pid, *children(pool.pid), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(map(lives, pids)))


async def test_owners_take_turns() -> None:
    places = FairPlaces(1)
    order: list[str] = []

    async def work_of(name: str) -> None:
        async with places.place(name[0]):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*map(work_of, ("a1", "a2", "a3", "a4", "b1", "b2", "c1")))
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


async def test_one_owner_leaves_a_place_for_another_and_cancelled_tasks_lose_none() -> None:
    places, ends = FairPlaces(3), asyncio.Event()
    inside: list[str] = []

    async def work_of(name: str) -> None:
        async with places.place(name[0]):
            inside.append(name)
            await ends.wait()

    tasks = {n: asyncio.create_task(work_of(n)) for n in ("a1", "a2", "a3", "a4")}
    await asyncio.sleep(0.01)
    assert inside == ["a1", "a2"]
    tasks["b1"] = asyncio.create_task(work_of("b1"))
    await until(lambda: inside[2:] == ["b1"])
    tasks["a3"].cancel()  # while it waits
    tasks["a1"].cancel()  # while it has a place, which is given on
    await until(lambda: inside[3:] == ["a4"])
    tasks["c1"] = asyncio.create_task(work_of("c1"))
    await asyncio.sleep(0)
    tasks["b1"].cancel()
    await asyncio.sleep(0)
    tasks["c1"].cancel()  # right after it got the place, before it has run
    await asyncio.wait([tasks["b1"], tasks["c1"]])
    with pytest.raises(asyncio.TimeoutError):
        async with places.place("a", 0.01):
            raise AssertionError("one owner has all places")
    async with places.place("d", LONG_S):
        ends.set()
    await asyncio.wait(tasks.values())
    assert not (places._waiting or places._held or places._served) and places._free == 3
