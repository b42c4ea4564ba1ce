"""Readers: owners share them fairly, and what nobody waits for is not read."""

import asyncio
import threading
import time
from collections import Counter

import pytest

from qwen3_omni_neuron.prompt.pauses import pause
from qwen3_omni_neuron.serving.edge.readers import READERS, Readers

pytestmark = pytest.mark.anyio


class Reading:
    """Calls that go on until `end`. steps: of each call, by its name."""

    def __init__(self) -> None:
        self.steps, self._end = Counter[str](), threading.Event()

    def read(self, name: str) -> None:
        while not self._end.is_set():
            self.steps[name] += 1
            pause()
            time.sleep(0.001)

    def end(self) -> None:
        self._end.set()

    async def moving(self) -> set[str]:
        """Return the calls that go on."""
        before = Counter(self.steps)
        await asyncio.sleep(0.1)
        return {name for name in self.steps if self.steps[name] > before[name]}

    async def until(self, owners: str) -> None:
        """Wait until calls of these owners go on, and no others."""
        end_s = time.monotonic() + 30
        while (found := "".join(sorted(name[0] for name in await self.moving()))) != owners:
            assert time.monotonic() < end_s, found


async def started(readers: Readers, reading: Reading, *names: str) -> list[asyncio.Task[None]]:
    """Start calls, whose owner is the first letter of their names, one after the other."""
    tasks = []
    for name in names:
        tasks.append(asyncio.create_task(readers.run(name[0], reading.read, name)))
        await asyncio.sleep(0.02)
    return tasks


async def test_an_owner_has_one_reader_while_another_owner_has_requests() -> None:
    with_requests, reading = {"a"}, Reading()
    readers = Readers(lambda owner: bool(with_requests - {owner}))
    names = [f"a{i}" for i in range(READERS + 1)]
    tasks = await started(readers, reading, *names)
    await reading.until("a" * READERS)  # alone, it has all
    with_requests.add("b")
    await reading.until("a")  # the others wait in their pauses
    tasks += await started(readers, reading, "b0", "b1")
    await reading.until("ab")
    tasks += await started(readers, reading, "c0", "d0")
    await reading.until("abcd")
    tasks += await started(readers, reading, "e0")
    await asyncio.sleep(1)
    assert reading.steps["e0"] > 10  # it takes turns with the four
    reading.end()
    await asyncio.gather(*tasks)
    readers.close()


async def test_what_nobody_waits_for_is_not_read_and_ends_at_its_next_pause() -> None:
    readers, reading = Readers(lambda owner: True), Reading()
    first, second = await started(readers, reading, "a0", "a1")
    second.cancel()
    await reading.until("a")
    first.cancel()
    await reading.until("")
    reading.end()
    tasks = await started(readers, reading, "a2")
    await asyncio.gather(*tasks)  # its turn came back
    assert "a1" not in reading.steps
    with pytest.raises(asyncio.CancelledError):
        await first
    readers.close()


async def test_a_turn_in_a_thread_of_its_own_waits_for_the_owners_other_reading() -> None:
    readers, reading = Readers(lambda owner: True), Reading()
    (task,) = await started(readers, reading, "a0")

    def read() -> None:
        with readers.turn("a"):
            pause()
            reading.steps["own"] += 1

    thread = threading.Thread(target=read)
    thread.start()
    await reading.until("a")
    assert not reading.steps["own"]
    reading.end()
    await task
    thread.join(30)
    assert reading.steps["own"] == 1
    readers.close()


async def test_a_call_that_gets_no_thread_gives_its_turn_back(monkeypatch) -> None:
    readers = Readers(lambda owner: False)
    with monkeypatch.context() as patch:
        patch.setattr(readers._pool, "_adjust_thread_count", _refuse)
        for _ in range(READERS):
            with pytest.raises(RuntimeError, match="no thread"):
                await readers.run("a", int)
    assert await asyncio.wait_for(readers.run("a", int), 30) == 0
    readers.close()


def _refuse() -> None:
    raise RuntimeError("no thread")
