"""Spilled rows in memory and in files: limits, order, damage, and what is left behind."""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qwen3_omni_neuron.errors import OutputError
from qwen3_omni_neuron.prompt.row_keys import BLOCK_ROWS, RowKeys
from qwen3_omni_neuron.runtime import spill
from qwen3_omni_neuron.runtime.spill import Key, SlotSpill, SpilledRows, SpillLimits
from qwen3_omni_neuron.runtime.spill_files import SpillFiles
from testing.prompts import keys_of

NOW = time.perf_counter
BLOCK = 2 * 32 * 2 + 3 * 4  # bytes of a block's rows and hidden states


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SpilledRows]:
    """A store of four blocks in memory and four in files."""
    made = SpilledRows(SpillLimits(4 * BLOCK, tmp_path, 4 * BLOCK))
    yield made
    made.close()


def key(number: int, cache_key: str | None = None) -> Key:
    return "thinker", cache_key, bytes([number])


def block(number: int) -> tuple[Tensor, Tensor]:
    rows = torch.full((2, 32), number / 3, dtype=torch.bfloat16)
    return rows, torch.full((1, 3), number / 3)


def wait_for(done: Callable[[], bool]) -> None:
    until_s = NOW() + 60.0
    while not done():
        assert NOW() < until_s
        time.sleep(0.001)


def is_written(store: SpilledRows) -> bool:
    with store._lock:
        return store._to_write() is None


def put(store: SpilledRows, *numbers: int) -> None:
    """Put blocks, each when there is space, and wait until what is to be written is written."""
    for number in numbers:
        wait_for(lambda: store.may_put(BLOCK))
        assert store.put(key(number), block(number))
        assert store.status().memory_bytes <= 4 * BLOCK
    wait_for(lambda: is_written(store))


def held(store: SpilledRows, *numbers: int) -> list[int]:
    lost = set(store.missing([key(number) for number in numbers]))
    return [number for index, number in enumerate(numbers) if index not in lost]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("rows-*/*"))


def assert_got(store: SpilledRows, number: int) -> None:
    found = store.get(key(number), NOW)
    assert found is not None
    for ours, right in zip(found, block(number), strict=True):
        assert torch.equal(ours, right) and ours.dtype == right.dtype


def test_the_least_recently_used_blocks_go_to_files_and_then_for_good(
    store: SpilledRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 0, 1, 2, 3, 4)
    status = store.status()
    assert (status.memory_bytes, status.disk_bytes) == (4 * BLOCK, 2 * BLOCK)
    assert_got(store, 0)  # from its file: 1 leaves the memory for it
    store.use([key(0)])
    put(store, 5, 6, 7)
    assert held(store, *range(8)) == [0, 2, 3, 4, 5, 6, 7]
    put(store, 8, 9, 10)
    assert len(files_of(tmp_path)) == 4
    assert store.status().disk_bytes == 4 * BLOCK
    assert held(store, *range(11)) == [0, 5, 6, 7, 8, 9, 10]
    # A block that is read would come into memory, and another one go to the disk for it.
    monkeypatch.setattr(store, "_make_space", lambda size: False)
    for number in (0, 5, 6, 7, 8, 9, 10):
        assert_got(store, number)
    restored = store.status().restored_rows
    assert sum(restored.values()) == 8 * BLOCK_ROWS and restored["disk"] >= 2 * BLOCK_ROWS
    assert store.status().failures == 0


def test_a_block_that_was_used_lets_an_older_one_be_written(store: SpilledRows) -> None:
    """Otherwise there would be no space for ever: the oldest block has no file, and none comes."""
    put(store, 0, 1, 2, 3)
    store.use([key(0)])
    put(store, 4)
    assert held(store, *range(5)) == [*range(5)]


def test_without_a_folder_the_least_recently_used_blocks_go_for_good() -> None:
    store = SpilledRows(SpillLimits(3 * BLOCK))
    for number in range(3):
        assert store.put(key(number), block(number))
    store.use([key(0), key(1)])  # the first of them last
    for number in (3, 4):
        assert store.may_put(BLOCK) and store.put(key(number), block(number))
        assert store.status().memory_bytes == 3 * BLOCK
    assert held(store, *range(5)) == [0, 3, 4]
    assert not store.put(key(5), [torch.zeros(BLOCK)]), "four times as large as the limit"
    store.close()
    assert not store.put(key(6), block(6))


def test_a_file_that_is_smaller_than_the_memory_is_not_written_over_and_over(
    tmp_path: Path,
) -> None:
    store = SpilledRows(SpillLimits(16 * BLOCK, tmp_path, BLOCK))
    put_count = 16
    for number in range(put_count):
        wait_for(lambda: store.may_put(BLOCK))
        store.put(key(number), block(number))
    wait_for(lambda: is_written(store))
    assert store.status().disk_bytes == BLOCK
    assert held(store, *range(16)) == [*range(3, 16)]
    store.close()


def test_blocks_of_another_cache_key_and_another_engine_are_others(store: SpilledRows) -> None:
    put(store, 1)
    assert store.get(key(1, "alice"), NOW) is None
    assert store.get(("talker", None, bytes([1])), NOW) is None


@pytest.mark.parametrize("damage", ["a bit", "shorter", "longer", "gone"])
def test_a_damaged_file_is_a_block_that_is_not_held(
    store: SpilledRows, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 0, 1, 2, 3, 4)
    first = files_of(tmp_path)[0]
    contents = first.read_bytes()
    if damage == "gone":
        first.unlink()
    else:
        changed = {"shorter": contents[:-1], "longer": contents + b"\0"}
        first.write_bytes(changed.get(damage, bytes([contents[0] ^ 1]) + contents[1:]))
    assert store.get(key(0), NOW) is None
    assert "spilled rows are lost, and computed again" in caplog.text
    assert str(first) in caplog.text
    assert store.status().failures == 1
    assert not held(store, 0) and not first.exists()
    assert store.status().disk_bytes == BLOCK
    assert_got(store, 1)


def test_where_files_cannot_be_written_rows_are_dropped_and_this_is_said_once(
    store: SpilledRows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder,) = tmp_path.glob("rows-*")
    folder.rename(tmp_path / "elsewhere")
    put(store, *range(8))
    assert held(store, *range(8)) == [5, 6, 7]
    assert caplog.text.count("can't be written") == 1
    assert f"Free space in {tmp_path}" in caplog.text
    (tmp_path / "elsewhere").rename(folder)
    put(store, 8)
    assert held(store, *range(9)) == [5, 6, 7, 8]
    assert store.status().failures == 5


def test_only_this_user_may_read_the_files_and_they_end_with_the_store(
    store: SpilledRows, tmp_path: Path
) -> None:
    put(store, *range(5))
    for path in (*files_of(tmp_path), *tmp_path.glob("rows-*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert files_of(tmp_path)
    store.close()
    assert not list(tmp_path.iterdir())
    assert store.get(key(0), NOW) is None


def test_files_of_a_process_that_was_killed_are_deleted_and_those_of_others_are_not(
    tmp_path: Path,
) -> None:
    killed, running = SpillFiles(tmp_path), SpillFiles(tmp_path)
    left, stored = killed.write([torch.zeros(3)]), running.write([torch.ones(3)])
    os.close(killed._lock)  # as the system does when a process ends
    SpillFiles(tmp_path).close()
    assert not left.path.parent.exists()
    assert files_of(tmp_path) == [stored.path]
    assert torch.equal(running.read(stored)[0], torch.ones(3))
    running.close()


def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows-pipe")
    made: list[SpillFiles] = []
    making = threading.Thread(target=lambda: made.append(SpillFiles(tmp_path)), daemon=True)
    making.start()
    making.join(10)
    assert made and (tmp_path / "rows-pipe").exists()
    made[0].close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutputError, match=r"spill_folder .*file can't be used: .* Name a folder"):
        SpilledRows(SpillLimits(1, tmp_path / "file", 1))


class Rows:
    """An engine of one byte a row. slow_s: time of the next copies into it."""

    row_bytes = 1

    def __init__(self) -> None:
        self.reads, self.writes, self.now_s, self.slow_s = 0, 0, 0.0, 0.0

    def read_rows(self, slot: int, start: int, stop: int) -> Tensor:
        self.reads += 1
        return torch.zeros(stop - start, dtype=torch.uint8)

    def write_rows(self, slot: int, start: int, rows: Tensor) -> None:
        self.writes += 1
        self.now_s += self.slow_s


@pytest.mark.parametrize("on_disk", [0, 1, 3])
def test_copies_end_where_memory_and_folder_are_too_small_for_one_conversation(
    tmp_path: Path, on_disk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn copies its new blocks; blocks that gave way to others are not copied again."""
    monkeypatch.setattr(spill, "PIECE_BYTES", 1)
    folder = tmp_path if on_disk else None
    store = SpilledRows(SpillLimits(4 * BLOCK_ROWS, folder, on_disk * BLOCK_ROWS))
    engine = Rows()
    copies = SlotSpill("thinker", engine, store, NOW)
    for blocks in (3, 12, 20):
        keys, reads = keys_of(blocks * BLOCK_ROWS), engine.reads

        def is_copied(keys: RowKeys = keys, rows: int = blocks * BLOCK_ROWS) -> bool:
            return copies.copy_out(0, keys, rows, torch.empty(0)) or engine.reads > 100

        wait_for(is_copied)
        assert engine.reads <= reads + blocks
        assert copies.count(keys) >= 2 * BLOCK_ROWS, "the first blocks serve a restore"
    store.close()


def test_one_slow_copy_from_memory_passes() -> None:
    """Each restore that its pace has prevented lets the next one expect a faster copy."""
    store, engine = SpilledRows(SpillLimits(1 << 10)), Rows()
    copies = SlotSpill("thinker", engine, store, lambda: engine.now_s)
    keys, rows = keys_of(BLOCK_ROWS), BLOCK_ROWS
    assert copies.copy_out(0, keys, rows, torch.empty(0))

    def restored() -> int:
        return copies.restore(0, keys, 0, rows, lambda rows: 0.001 * rows)[0]

    engine.slow_s = 1.0
    assert restored() == rows
    engine.slow_s = 0.0
    found = [restored() for _ in range(100)]
    assert found[0] == 0 and found[-1] == rows
    assert engine.writes > 2
    store.close()


class SlowAtTheEnd(Rows):
    """The last of eight blocks waits for a core."""

    def write_rows(self, slot: int, start: int, rows: Tensor) -> None:
        super().write_rows(slot, start, rows)
        if start == 7 * BLOCK_ROWS:
            self.now_s += 0.05


def test_one_slow_block_does_not_stand_for_all() -> None:
    store, engine = SpilledRows(SpillLimits(1 << 14)), SlowAtTheEnd()
    copies, rows = SlotSpill("thinker", engine, store, lambda: engine.now_s), 8 * BLOCK_ROWS
    keys = keys_of(rows)
    while not copies.copy_out(0, keys, rows, torch.empty(0)):
        pass
    for _ in range(5):
        found = copies.restore(0, keys, 0, rows, lambda rows: 0.001 * rows)
        assert found[0] == rows
    store.close()
