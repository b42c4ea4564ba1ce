"""Prefix cache: records of the rows that an engine's slots hold, for later prompts.

A slot keeps the rows of its last request, also after that has ended. A prompt that begins with the
same rows is computed from the first row that differs: a client that sends its whole history each
time, a session, and many requests with one system prompt all benefit. Rows that
another slot holds, busy or free, are copied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen3_omni_neuron.prompt.row_keys import RowKeys

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
    """

    def __init__(self, slots: int):
        self._rows: list[CachedRows | None] = [None] * slots

    def __getitem__(self, slot: int) -> CachedRows | None:
        return self._rows[slot]

    def put(self, slot: int, rows: CachedRows | None) -> None:
        """Set the record of the rows that a slot holds now; None: no rows."""
        self._rows[slot] = rows

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
        return best if in_place else free[0], max(counts)

    def count(self, keys: RowKeys) -> int:
        """Return how many of a prompt's first rows any slot holds. Any thread may call it."""
        return max(self._counts(keys))

    def bring(
        self, slot: int, keys: RowKeys, most: int, copy: Callable[[int, int, int], None]
    ) -> CachedRows:
        """Make a slot hold as many of a prompt's first rows as any slot does, and no others.

        Where another slot has at least COPY_ROWS more, its rows are copied. most: largest number of
        rows. copy: the engine's method; see Thinker.copy. Returns the record of the rows.
        """
        counts = self._counts(keys)
        source = counts.index(max(counts))
        if counts[source] < counts[slot] + COPY_ROWS:
            source = slot
        count, cached = min(counts[source], most), self._rows[source]
        accepted = NO_ACCEPTED if cached is None else cached.accepted[: keys.media_rows(count)]
        if source != slot:
            self.put(slot, None)  # until the copy has succeeded
            copy(source, slot, count)
        rows = CachedRows(keys, count, accepted)
        self.put(slot, rows)
        return rows

    def _counts(self, keys: RowKeys) -> list[int]:
        """Return how many of a prompt's first rows each slot holds."""
        return [0 if r is None else min(r.count, r.keys.shared(keys)) for r in self._rows]
