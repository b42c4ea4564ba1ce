"""Prefix cache: records of the rows that an engine's slots hold, for later prompts.

A slot keeps the rows of its last request, also after that has ended. A prompt that begins with the
same rows is computed from the first row that differs: a client that sends its whole history each
time, a session, and many requests with one system prompt all benefit. Rows that
another slot holds, busy or free, are copied. Rows that no slot holds any more may have been spilled
(see runtime.spill): they are copied back.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen3_omni_neuron.prompt.row_keys import BLOCK_ROWS, RowKeys
from qwen3_omni_neuron.runtime.spill import SlotSpill

logger = logging.getLogger(__name__)

NO_ACCEPTED = torch.empty(0)
COPY_ROWS = 16  # computing fewer rows takes about as long as copying them


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Rows of one prompt, or of its beginning, in one slot.

    keys: row keys of the whole prompt. count: number of its first rows that are held. accepted: the
    thinker's accept-layer hidden states [media, hidden] at the media positions among these rows;
    empty in the talker's record.
    """

    keys: RowKeys
    count: int
    accepted: Tensor


class PrefixCache:
    """Rows that each slot of one engine holds.

    Only the thread of the engine's stage changes them. Any thread may `choose` and `count`, without
    a lock: the record of a slot is one object that never changes, and `bring` compares again.
    spill: where the slots' rows are copied to before others take the slots; None: nowhere.
    """

    def __init__(self, slots: int, spill: SlotSpill | None = None):
        self._rows: list[CachedRows | None] = [None] * slots
        self._spill = spill
        # Slots whose rows may not all have been copied out, the least recently changed first.
        self._uncopied: dict[int, None] = {}

    def __getitem__(self, slot: int) -> CachedRows | None:
        return self._rows[slot]

    def put(self, slot: int, rows: CachedRows | None) -> None:
        """Set the record of the rows that a slot holds now; None: no rows."""
        self._rows[slot] = rows
        self._uncopied.pop(slot, None)
        if self._spill is not None and rows is not None:
            self._uncopied[slot] = None

    def choose(self, free: Sequence[int], keys: RowKeys) -> tuple[int, int]:
        """Choose one of the free slots for a prompt. free: the least recently used one first.

        It is the slot that shares the most rows with the prompt, if these are at least half of what
        the slot holds. Otherwise the slot's other rows may still serve their own
        conversation, and the choice is the least recently used slot, to which `bring` copies the
        shared rows. Returns the slot, and what `count` returns.
        """
        counts = self._counts(keys)
        best = max(free, key=lambda slot: counts[slot])
        cached = self._rows[best]
        in_place = cached is not None and 2 * counts[best] >= cached.count
        most = max(self._spilled(keys), *counts)
        return best if in_place else free[0], most

    def count(self, keys: RowKeys) -> int:
        """Return how many of a prompt's first rows any slot holds, or the spilled ones.

        Any thread may call it.
        """
        return max(self._spilled(keys), *self._counts(keys))

    def bring(
        self,
        slot: int,
        keys: RowKeys,
        most: int,
        copy: Callable[[int, int, int], None],
        prefill_s: Callable[[int], float],
    ) -> tuple[CachedRows, bool]:
        """Make a slot hold as many of a prompt's first rows as there are, and no others.

        Where another slot has at least COPY_ROWS more, its rows are copied; then spilled rows are,
        where there are that many more of them. most: largest number of rows. copy: the engine's
        method; see Thinker.copy. prefill_s: returns the expected time to compute so many rows.
        Returns the record of the rows, and whether that is all: False after a part of the spilled
        rows, where the next call goes on.
        """
        counts = self._counts(keys)
        source = counts.index(max(counts))
        if counts[source] < counts[slot] + COPY_ROWS:
            source = slot
        count, cached = min(counts[source], most), self._rows[source]
        accepted = NO_ACCEPTED if cached is None else cached.accepted
        if len(accepted):
            accepted = accepted[: keys.media_rows(count)]
        rows = CachedRows(keys, count, accepted)
        if source != slot:
            self.put(slot, None)  # until the copy has succeeded
            copy(source, slot, count)
        rows, whole = self._restored(slot, rows, most, prefill_s)
        self.put(slot, rows)
        return rows, whole

    @property
    def may_copy_out(self) -> bool:
        """True where `copy_out` has work and space.

        As long as a slot is empty, no other one is taken, and no rows are lost.
        """
        if self._spill is None or not self._uncopied or None in self._rows:
            return False
        return self._spill.has_space

    def copy_out(self) -> None:
        """Copy some rows of one slot to where they are spilled; see SlotSpill.copy_out."""
        assert self._spill is not None
        slot = next(iter(self._uncopied))
        rows, done = self._rows[slot], True
        if rows is not None:
            try:
                done = self._spill.copy_out(slot, rows.keys, rows.count, rows.accepted)
            except Exception:
                logger.exception("rows of slot %d can't be copied out", slot)
        if done:
            del self._uncopied[slot]

    def _restored(
        self, slot: int, rows: CachedRows, most: int, prefill_s: Callable[[int], float]
    ) -> tuple[CachedRows, bool]:
        """Append spilled rows to the rows of a slot; see `bring`."""
        if self._spill is None:
            return rows, True
        keys, wanted = rows.keys, min(self._spilled(rows.keys), most)
        if wanted < rows.count + COPY_ROWS:
            return rows, True
        self.put(slot, None)  # until the copy has ended
        held, media = self._spill.restore(slot, keys, rows.count, wanted, prefill_s)
        before = rows.accepted[: keys.media_rows(rows.count // BLOCK_ROWS * BLOCK_ROWS)]
        parts = [part for part in (before, *media) if len(part)] if media else [rows.accepted]
        count = min(held, most)
        accepted = (torch.cat(parts) if parts else NO_ACCEPTED)[: keys.media_rows(count)]
        return replace(rows, count=count, accepted=accepted), not rows.count < count < wanted

    def _spilled(self, keys: RowKeys) -> int:
        """Return how many of a prompt's first rows can be restored."""
        return 0 if self._spill is None else self._spill.count(keys)

    def _counts(self, keys: RowKeys) -> list[int]:
        """Return how many of a prompt's first rows each slot holds."""
        return [0 if r is None else min(r.count, r.keys.shared(keys)) for r in self._rows]
