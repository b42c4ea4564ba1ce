"""Spilled rows: copies of slots' KV rows in memory and on disk, for when others take the slots.

Rows are kept in blocks of BLOCK_ROWS, each under the digest of all row keys up to its end (see
prompt.row_keys). So what conversations begin with alike is kept once, a turn adds only its new
blocks, and a block that is lost costs the rows from there on and none before it.

`SpilledRows` holds the blocks of all engines within two limits. The least recently used block goes
first: from memory to the disk, if there is a folder, and from there for good. `SlotSpill` copies
one engine's rows there and back.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qwen3_omni_neuron.engines.protocols import HostRows
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.events import SpillStatus
from qwen3_omni_neuron.prompt.row_keys import BLOCK_ROWS, RowKeys
from qwen3_omni_neuron.runtime.spill_files import DamagedFileError, SpillFiles, StoredTensors

logger = logging.getLogger(__name__)

# Copied out at once, or one block if that is more: a request that comes meanwhile waits for its
# end. A block of the released thinker in float32 has 3 MiB.
PIECE_BYTES = 1 << 20
RESTORE_S = 0.1  # time of one restore, after which other requests' steps come
# Seconds a byte, before they are measured: slow memory, and a slow disk.
COPY_PACE_S, READ_PACE_S = 1 / 1e9, 1 / 300e6
# After a restore is skipped as too slow, lower the estimate by 10 %, so that one slow read does not
# disable restores.
FORGIVEN = 0.9
# Share of the memory: blocks beyond it are written to the disk, the least recently used first.
WRITTEN_SHARE = 0.75

Key = tuple[str, str | None, bytes]
"""Engine, cache_key, and digest of all row keys up to a block's end."""


@dataclass(frozen=True)
class SpillLimits:
    """Most bytes of spilled rows in memory, and in files below a folder; None: no files."""

    memory_bytes: int
    folder: Path | None = None
    folder_bytes: int = 0

    @staticmethod
    def of(
        memory_bytes: int, folder: str | Path | None, folder_bytes: int, reuse: bool
    ) -> "SpillLimits | None":
        """Return the limits that options of a load give, None where no rows are spilled.

        reuse: whether there is a prefix cache. Raises OptionError.
        """
        if folder is not None and not memory_bytes:
            raise OptionError(
                "spill_folder takes rows that have no more space in spill_bytes, which is 0. Give "
                "spill_bytes, such as 1073741824."
            )
        if not memory_bytes:
            return None
        if not reuse:
            raise OptionError(
                f"spill_bytes is {memory_bytes}, and without a prefix cache no rows are reused. "
                "Leave it out, or reuse=False."
            )
        return SpillLimits(memory_bytes, None if folder is None else Path(folder), folder_bytes)


class _Block:
    """Rows of one block. tensors: None where only the file has them. file: None before."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors: Sequence[Tensor] | None = tensors
        self.size = sum(tensor.nbytes for tensor in tensors)
        self.file: StoredTensors | None = None


class SpilledRows:
    """Blocks of rows in memory and on disk.

    _lock guards every field; it is not held while files are read or written. If there is a folder,
    a thread writes the files.
    """

    def __init__(self, limits: SpillLimits, on_space: Callable[[], None] = lambda: None):
        """Make an empty store. on_space: called when memory was freed. Raises OutputError."""
        self.limits, self._on_space = limits, on_space
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Least recently used first: blocks whose tensors are in memory, and blocks with a file.
        self._memory: OrderedDict[Key, _Block] = OrderedDict()
        self._disk: OrderedDict[Key, _Block] = OrderedDict()
        self._memory_bytes = self._disk_bytes = 0
        self._restored = {"memory": 0, "disk": 0}
        self._failures = 0
        self._read_pace_s = READ_PACE_S
        self._closing = False
        self._files: SpillFiles | None = None
        if limits.folder is not None:
            self._files = SpillFiles(limits.folder)
            self._writer = threading.Thread(
                target=self._write_all, args=(self._files,), name="qwen3-omni-spill", daemon=True
            )
            self._writer.start()

    def missing(self, keys: Sequence[Key]) -> Iterator[int]:
        """Yield the indices of the blocks that are not held, ascending."""
        for index, key in enumerate(keys):
            with self._lock:
                held = self._block(key)
            if held is None:
                yield index

    def expected_s(self, keys: Sequence[Key], copy_pace_s: float) -> float:
        """Return the expected time to read blocks and to copy them at this pace, seconds a byte."""
        with self._lock:
            blocks = [block for key in keys if (block := self._block(key)) is not None]
            read_bytes = sum(block.size for block in blocks if block.tensors is None)
            copied_bytes = sum(block.size for block in blocks)
            return copied_bytes * copy_pace_s + read_bytes * self._read_pace_s

    def forgive(self) -> None:
        """Expect the disk to be a little faster, because the expected time prevented a restore."""
        with self._lock:
            self._read_pace_s *= FORGIVEN

    def may_put(self, size: int) -> bool:
        """Return whether so many bytes may be put now, after dropping blocks to make space.

        With a folder, a block is dropped from memory once it is written. Until then the answer is
        False; `on_space` is called afterwards.
        """
        with self._lock:
            return self._make_space(size)

    def put(self, key: Key, tensors: Sequence[Tensor]) -> bool:
        """Hold a block. Its tensors must not change. Returns whether there was space; see may_put.

        Another engine's block may have taken the space that `may_put` has found.
        """
        block = _Block(tensors)
        with self._lock:
            if self._closing or not self._make_space(block.size):
                return False
            self._keep(key, block)
            return True

    def use(self, keys: Sequence[Key]) -> None:
        """Make blocks the most recently used. The first is used last, as all others need it."""
        with self._lock:
            for key in reversed(keys):
                for blocks in (self._memory, self._disk):
                    if key in blocks:
                        blocks.move_to_end(key)
            self._changed.notify()  # another block may be the next to write

    def get(self, key: Key, now: Callable[[], float]) -> Sequence[Tensor] | None:
        """Return a block, read from its file if necessary. None: it is not held, or can't be read.

        now: a clock in seconds.
        """
        with self._lock:
            block = self._block(key)
            if block is None:
                return None
            if block.tensors is not None:
                self._restored["memory"] += BLOCK_ROWS
                return block.tensors
            file = block.file
        assert file is not None and self._files is not None
        start_s = now()
        try:
            tensors = self._files.read(file)
        except (OSError, DamagedFileError) as error:
            with self._lock:
                if self._disk.get(key) is block:  # otherwise it was dropped meanwhile
                    logger.warning("spilled rows are lost, and computed again: %s.", error)
                    self._failures += 1
                    self._drop_file(key)
            return None
        with self._lock:
            self._read_pace_s = (self._read_pace_s + (now() - start_s) / block.size) / 2
            self._restored["disk"] += BLOCK_ROWS
            if self._disk.get(key) is block and self._make_space(block.size):
                block.tensors = tensors
                self._keep(key, block)
        return tensors

    def failed(self) -> None:
        """Count a copy that an engine has failed."""
        with self._lock:
            self._failures += 1

    def status(self) -> SpillStatus:
        """Return what is held, and what was restored so far."""
        with self._lock:
            restored = dict(self._restored)
            return SpillStatus(self._memory_bytes, self._disk_bytes, restored, self._failures)

    def close(self, join_timeout_s: float | None = None) -> None:
        """Drop all blocks, and delete their files. join_timeout_s: longest wait for the writer."""
        with self._lock:
            self._closing = True
            self._memory.clear()
            self._disk.clear()
            self._memory_bytes = self._disk_bytes = 0
            self._changed.notify()
        if self._files is not None:
            self._writer.join(join_timeout_s)
            self._files.close()

    def _block(self, key: Key) -> _Block | None:
        return self._memory.get(key) or self._disk.get(key)

    def _keep(self, key: Key, block: _Block) -> None:
        self._memory[key] = block
        self._memory_bytes += block.size
        self._changed.notify()

    def _make_space(self, size: int) -> bool:
        if size > self.limits.memory_bytes:
            return False
        while self._memory_bytes + size > self.limits.memory_bytes:
            key, block = next(iter(self._memory.items()))
            if self._files is not None and block.file is None:
                return False  # until it is written
            self._leave_memory(key)
        return True

    def _leave_memory(self, key: Key) -> None:
        block = self._memory.pop(key, None)
        if block is not None:
            self._memory_bytes -= block.size
            block.tensors = None
            if block.file is not None:
                self._disk.move_to_end(key)  # more recently used than what left before it

    def _drop_file(self, key: Key) -> None:
        block = self._disk.pop(key)
        assert block.file is not None and self._files is not None
        self._disk_bytes -= block.size
        self._files.delete(block.file)
        block.file = None

    def _write_all(self, files: SpillFiles) -> None:
        """Write blocks until the store is closed."""
        works = True
        while (written := self._next_to_write()) is not None:
            key, block, tensors = written
            file = None
            try:
                file = files.write(tensors)
            except OSError as error:
                (logger.warning if works else logger.debug)(
                    "spilled rows can't be written, and are dropped: %s. Free space in %s, or load "
                    "with a smaller spill_folder_bytes.",
                    error,
                    self.limits.folder,
                )
            works = file is not None
            with self._lock:
                self._written(key, block, file)
            self._on_space()

    def _next_to_write(self) -> tuple[Key, _Block, Sequence[Tensor]] | None:
        """Wait for a block to write; return None where the store is closed."""
        with self._lock:
            while not self._closing:
                if (found := self._to_write()) is not None:
                    return found
                self._changed.wait()
        return None

    def _to_write(self) -> tuple[Key, _Block, Sequence[Tensor]] | None:
        """Return the oldest block that has no file and is beyond its share of the memory."""
        beyond = self._memory_bytes - WRITTEN_SHARE * self.limits.memory_bytes
        for key, block in self._memory.items():
            if beyond <= 0:
                break
            if block.file is None and block.tensors is not None:
                return key, block, block.tensors
            beyond -= block.size
        return None

    def _written(self, key: Key, block: _Block, file: StoredTensors | None) -> None:
        """Record the file of a block, None where it could not be written. The lock is held."""
        if self._closing:
            return
        if file is None:
            self._failures += 1
            self._leave_memory(key)
            return
        block.file = file
        self._disk[key] = block
        self._disk_bytes += block.size
        while self._disk_bytes > self.limits.folder_bytes:
            files_alone = (k for k, held in self._disk.items() if held.tensors is None)
            oldest = next(files_alone, next(iter(self._disk)))
            self._drop_file(oldest)
            self._leave_memory(oldest)  # otherwise it would be written again


class SlotSpill:
    """Copies of one engine's slots in `SpilledRows`. Only the engine's thread copies.

    name: the engine's name. now: a clock in seconds.
    """

    def __init__(self, name: str, engine: HostRows, store: SpilledRows, now: Callable[[], float]):
        """Raises OptionError where the store has no space for one block."""
        self._name, self._engine, self._store, self._now = name, engine, store, now
        self._block_bytes = BLOCK_ROWS * engine.row_bytes
        self._next_bytes = self._block_bytes  # size of the next block to copy out, with its media
        self._pace_s = COPY_PACE_S
        # Keys of the rows that were copied out last, and how many of their blocks were tried.
        self._copied: RowKeys | None = None
        self._reached = 0
        if self._block_bytes > store.limits.memory_bytes:
            raise OptionError(
                f"spill_bytes is {store.limits.memory_bytes}, and {BLOCK_ROWS} rows of the {name} "
                f"take {self._block_bytes} bytes. Give more, such as 1073741824, or 0 for none. "
                "Rows of thinker and talker share it."
            )

    @property
    def has_space(self) -> bool:
        """True where the next block may be copied out now."""
        return self._store.may_put(self._next_bytes)

    def count(self, keys: RowKeys) -> int:
        """Return how many of a prompt's first rows can be restored. Any thread may call it."""
        blocks = self._keys(keys)
        return BLOCK_ROWS * next(self._store.missing(blocks), len(blocks))

    def copy_out(self, slot: int, keys: RowKeys, count: int, accepted: Tensor) -> bool:
        """Copy blocks of a slot's first rows that the store lacks: PIECE_BYTES, at least one block.

        They end where a block that was copied for these keys was dropped again: then the limits
        hold no more of them. count, accepted: see runtime.prefix_cache.CachedRows. Returns whether
        that is all.
        """
        if self._copied is not keys:
            self._copied, self._reached = keys, 0
        blocks, copied = self._keys(keys)[: count // BLOCK_ROWS], 0
        self._store.use(blocks)  # so that the rows of others go first, and then the last of these
        for index in self._store.missing(blocks):
            if index < self._reached:
                break
            start, stop = index * BLOCK_ROWS, (index + 1) * BLOCK_ROWS
            media = accepted[keys.media_rows(start) : keys.media_rows(stop)].clone()
            self._next_bytes = self._block_bytes + media.nbytes
            if self._next_bytes > self._store.limits.memory_bytes:
                break  # it never has space, and the blocks after it need it
            if copied >= PIECE_BYTES or not self.has_space:
                return False
            rows = self._engine.read_rows(slot, start, stop)
            if not self._store.put(blocks[index], (rows, media)):
                return False
            self._reached = index + 1
            copied += self._block_bytes
        self._next_bytes = self._block_bytes
        self._store.use(blocks)
        return True

    def restore(
        self,
        slot: int,
        keys: RowKeys,
        start: int,
        stop: int,
        prefill_s: Callable[[int], float],
    ) -> tuple[int, list[Tensor]]:
        """Copy rows into a slot that holds the first `start`, up to `stop` or a little further.

        They end earlier after RESTORE_S, at a block that can't be read, and where the engine fails.
        Nothing is copied if that is expected to take longer than to compute the rows, which takes
        prefill_s(rows). Returns how many rows the slot holds, and the hidden states of the copied
        blocks' media, from the last multiple of BLOCK_ROWS before `start` on.
        """
        first, last = start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)
        blocks = self._keys(keys)[:last]
        computed_s = prefill_s(stop - start)
        if 0.0 < computed_s < self._store.expected_s(blocks[first:], self._pace_s):
            self._store.forgive()
            self._pace_s *= FORGIVEN
            return start, []
        self._store.use(blocks)
        accepted: list[Tensor] = []
        begin_s, copying_s = self._now(), 0.0
        for index in range(first, last):
            found = self._store.get(blocks[index], self._now)
            if found is None:
                break
            rows, media = found
            copy_s = self._now()
            try:
                self._engine.write_rows(slot, index * BLOCK_ROWS, rows)
            except Exception:
                logger.exception("rows could not be copied to the %s, and are computed", self._name)
                self._store.failed()
                return index * BLOCK_ROWS, accepted
            copying_s += self._now() - copy_s
            accepted.append(media)
            start = max(start, (index + 1) * BLOCK_ROWS)
            if self._now() - begin_s > RESTORE_S:
                break
        if accepted:  # the mean of all blocks: one may have waited for a core
            pace_s = copying_s / (len(accepted) * self._block_bytes)
            self._pace_s = (self._pace_s + pace_s) / 2
        return start, accepted

    def _keys(self, keys: RowKeys) -> list[Key]:
        return [(self._name, keys.cache_key, digest) for digest in keys.block_digests]
