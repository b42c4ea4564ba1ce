"""Records of the rows that an engine's slots hold, by which requests reuse them.

A slot keeps what was computed in it last, also when its request has ended. A prompt that begins
with the same rows is computed from the first row that differs: a client that sends its whole
history each time, a session, and many requests with one system prompt profit alike. Rows that
another slot holds, be it busy or free, are copied.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen3_omni_neuron.conversation.row_keys import RowKeys


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
    given their slots in any thread.
    """

    def __init__(self, slots: int, lock: threading.RLock):
        self._rows: list[Rows | None] = [None] * slots
        self._lock = lock

    def __getitem__(self, slot: int) -> Rows | None:
        return self._rows[slot]

    def put(self, slot: int, rows: Rows | None) -> None:
        """Set what a slot holds now, None for nothing."""
        with self._lock:
            self._rows[slot] = rows

    def shared(self, keys: RowKeys, cache_key: str | None) -> int:
        """Return how many of a prompt's first rows some slot holds."""
        return self._best(range(len(self._rows)), keys, cache_key)[1]

    def choose(self, free: Sequence[int], keys: RowKeys, cache_key: str | None) -> int:
        """Choose one of the free slots for a prompt. free: the least recently used one first.

        It is the slot that shares most with the prompt, where the prompt keeps at least half of
        what it holds. Otherwise the rest may still serve whom it belongs to: then it is the least
        recently used slot, to which `bring` copies the shared rows.
        """
        slot, shared = self._best(free, keys, cache_key)
        held = self._rows[slot]
        return slot if held is not None and 2 * shared >= len(held.keys) else free[0]

    def bring(
        self,
        slot: int,
        keys: RowKeys,
        cache_key: str | None,
        most: int,
        copy: Callable[[int, int, int], None],
    ) -> Rows:
        """Let a slot hold as many of a prompt's first rows as any slot does, and nothing else.

        most: limit of that. copy: the engine's, see Thinker.copy. Returns the rows.
        """
        others = [other for other in range(len(self._rows)) if other != slot]
        source, shared = self._best([slot, *others], keys, cache_key)
        held = self._rows[source]
        if held is None or not shared:
            held = Rows(keys, cache_key, torch.empty(0))
        rows = held.first(min(shared, most))
        self.put(slot, None)  # until the copy has succeeded
        if source != slot and len(rows.keys):
            copy(source, slot, len(rows.keys))
        self.put(slot, rows)
        return rows

    def _best(self, slots: Sequence[int], keys: RowKeys, cache_key: str | None) -> tuple[int, int]:
        """Return the slot that holds most of a prompt's first rows, and how many.

        It is the first one of several that hold as many.
        """
        counts = [0] * len(slots)
        for index, slot in enumerate(slots):
            held = self._rows[slot]
            if held is not None and held.cache_key == cache_key:
                counts[index] = held.keys.shared(keys)
        most = max(counts)
        return slots[counts.index(most)], most
