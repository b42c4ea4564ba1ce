"""Records of the rows that an engine's slots hold, by which requests reuse them.

A slot keeps what was computed in it last, also when its request has ended. A prompt that begins
with the same rows is computed from the first row that differs: a client that sends its whole
history each time, a session, and many requests with one system prompt profit alike. Rows that
another slot holds, be it busy or free, are copied.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.conversation.row_keys import WIDTH, RowKeys

HEAD_ROWS = 64  # most prompts differ within these
COPY_ROWS = 16  # computing fewer takes about as long as copying them


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one prompt, or of its beginning.

    cache_key: only requests with the same one share rows. accepted: the thinker's accept-layer
    hidden states [media, hidden] at the rows of media; empty in the talker's record.
    """

    keys: RowKeys
    cache_key: str | None
    accepted: Tensor

    def first(self, rows: int) -> "Rows":
        """Return the first rows."""
        accepted = self.accepted[: self.keys.media_rows(rows)]
        return Rows(self.keys.first(rows), self.cache_key, accepted)


class HeldRows:
    """Rows that each slot of one engine holds.

    Only the thread of the engine's stage changes them; the lock guards them, since requests are
    given their slots in any thread. _heads: keys of the first HEAD_ROWS rows of each slot, -1 where
    there are fewer, by which all slots are compared at once.
    """

    def __init__(self, slots: int, lock: threading.RLock):
        self._rows: list[Rows | None] = [None] * slots
        self._heads = np.full((slots, HEAD_ROWS, WIDTH), -1, np.int32)
        self._lock = lock

    def __getitem__(self, slot: int) -> Rows | None:
        return self._rows[slot]

    def put(self, slot: int, rows: Rows | None) -> None:
        """Set what a slot holds now, None for nothing."""
        with self._lock:
            self._rows[slot] = rows
            count = 0 if rows is None else min(len(rows.keys), HEAD_ROWS)
            self._heads[slot, count:] = -1
            if rows is not None:
                self._heads[slot, :count] = rows.keys.values[:count]

    def choose(self, free: Sequence[int], keys: RowKeys, cache_key: str | None) -> tuple[int, int]:
        """Choose one of the free slots for a prompt. free: the least recently used one first.

        It is the slot that shares most with the prompt, where the prompt keeps at least half of
        what it holds. Otherwise the rest may still serve whom it belongs to: then it is the least
        recently used slot, to which `bring` copies the shared rows. Returns it, and how many of the
        prompt's first rows some slot holds.
        """
        counts = self._counts(keys, cache_key)
        best = max(free, key=lambda slot: counts[slot])
        held = self._rows[best]
        in_place = held is not None and 2 * counts[best] >= len(held.keys)
        return best if in_place else free[0], max(counts)

    def bring(
        self,
        slot: int,
        keys: RowKeys,
        cache_key: str | None,
        most: int,
        copy: Callable[[int, int, int], None],
    ) -> Rows:
        """Let a slot hold as many of a prompt's first rows as any slot does, and nothing else.

        Where another slot has at least COPY_ROWS more, its rows are copied. most: limit of the
        rows. copy: the engine's, see Thinker.copy. Returns the rows.
        """
        counts = self._counts(keys, cache_key)
        source = counts.index(max(counts))
        if counts[source] < counts[slot] + COPY_ROWS:
            source = slot
        shared, held = counts[source], self._rows[source]
        if held is None or not shared:
            held = Rows(keys, cache_key, torch.empty(0))
        rows = held.first(min(shared, most))
        if source != slot:
            self.put(slot, None)  # until the copy has succeeded
            copy(source, slot, len(rows.keys))
        self.put(slot, rows)
        return rows

    def _counts(self, keys: RowKeys, cache_key: str | None) -> list[int]:
        """Return how many of a prompt's first rows each slot holds."""
        head = keys.values[:HEAD_ROWS]
        if not len(head):
            return [0] * len(self._rows)
        same = (self._heads[:, : len(head)] == head).all(2)
        counts: list[int] = np.logical_and.accumulate(same, 1).sum(1).tolist()
        for slot, held in enumerate(self._rows):
            if held is None or held.cache_key != cache_key:
                counts[slot] = 0
            elif counts[slot] == HEAD_ROWS:
                counts[slot] = held.keys.shared(keys)
        return counts
