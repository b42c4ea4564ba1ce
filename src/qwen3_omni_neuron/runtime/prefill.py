"""Prefill of prompts, in which the thinker's stage and the talker's are alike.

The rows of a prompt that the prefix cache has are brought into its slot, and the others are
computed, in chunks where other requests run. A prompt that is prefilled ahead of its request is
computed in pauses (runtime.policy).

The prefix cache records the rows that an engine's slots hold. A slot keeps the rows of its last
request, also after that has ended. A prompt that begins with the same rows is computed from the
first row that differs: a client that sends its whole history each time, a session, and many
requests with one system prompt all benefit. Rows that another slot holds are copied.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import Talker, Thinker
from qwen3_omni_neuron.prompt.prompt import RowKeys
from qwen3_omni_neuron.runtime.policy import AHEAD_ROWS, SchedulingPolicy
from qwen3_omni_neuron.runtime.request import LiveRequest
from qwen3_omni_neuron.runtime.stage import Result, Shared, Stage, Task

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


class PromptTask(Task):
    """A request in a stage that computes its prompt.

    rows: number of the prompt's rows that may be cached. keys: their row keys, None without a
    prefix cache. most: how many of them are taken from the cache at most.
    """

    def __init__(self, live: LiveRequest, rows: int, keys: RowKeys | None, most: int):
        super().__init__(live)
        self.rows, self.keys, self.most = rows, keys, most

    def media_rows(self, rows: int) -> int:
        """Count the rows of media among the first `rows`; 0 without a prefix cache."""
        return 0 if self.keys is None else self.keys.media_rows(rows)


AnyPrompt = TypeVar("AnyPrompt", bound=PromptTask)


class PrefillStage(Stage[AnyPrompt]):
    """Base of the stages whose engine computes prompts.

    cache: prefix cache, with the rows that the engine's slots hold.
    """

    _engine: Thinker | Talker

    def __init__(
        self, name: str, engine: Thinker | Talker, shared: Shared, policy: SchedulingPolicy
    ):
        super().__init__(name, shared)
        self._engine, self._policy = engine, policy
        self.cache = PrefixCache(engine.slots)

    @abstractmethod
    def _compute(self, task: AnyPrompt, start: int, stop: int) -> Tensor | None:
        """Compute rows of a prompt in the engine.

        Returns the hidden states of their media; None where a later call completes the rows.
        """

    @abstractmethod
    def _may_be_cut(self, task: AnyPrompt) -> bool:
        """Return whether a call may compute a part of the rows that are left."""

    def _chunk_rows(self, task: AnyPrompt) -> int:
        """Return how many rows of a prompt the next call computes. The lock is held.

        Before the first call this is an estimate.
        """
        rows = task.rows - min(task.live.prefilled_rows[self.name], task.most)
        if task.live.request.ahead:
            return min(rows, AHEAD_ROWS)
        cut = len(self._tasks) > 1 and task.keys is not None and self._may_be_cut(task)
        return self._policy.chunk_rows(rows) if cut else rows

    def _in_pause(self, ahead: Sequence[AnyPrompt]) -> list[AnyPrompt]:
        """Return the first of the prompts to prefill ahead, if a call for it may come now."""
        return [task for task in ahead[:1] if self._policy.is_pause(self._chunk_rows(task))]

    def _each(
        self, tasks: Sequence[AnyPrompt], call: Callable[[AnyPrompt], Result]
    ) -> Iterator[tuple[AnyPrompt, Result]]:
        """Call the engine for each task alone, when the next pair is asked for."""
        for task in tasks:
            yield from self._call_engine((task,), lambda tasks: [call(task) for task in tasks])

    def _prefill(self, task: AnyPrompt) -> tuple[bool, Tensor]:
        """Bring the rows of a prompt that the cache has into its slot, and compute the next ones.

        Returns whether all of it is computed that is known, and the hidden states of its media.
        """
        start, stop = 0, task.rows
        if task.keys is None:  # one call computes all rows
            task.live.prefilled_rows[self.name] = stop
        else:
            start = self.cache.bring(task.slot, task.keys, task.most, self._engine.copy).count
            task.live.prefilled_rows[self.name] = start
            with self._lock:
                stop = start + self._chunk_rows(task)
        accepted = self._compute(task, start, stop)
        if accepted is not None:
            accepted = self._put(task, stop, accepted)
        task.prefilled_s = self._clock.now()
        return stop == task.rows, NO_ACCEPTED if accepted is None else accepted

    def _put(self, task: AnyPrompt, stop: int, accepted: Tensor = NO_ACCEPTED) -> Tensor:
        """Record that a prompt's slot holds its first rows, up to `stop`.

        accepted: the thinker's hidden states at the media positions of the rows that were computed
        last. Returns those of all rows that the slot holds.
        """
        task.live.prefilled_rows[self.name] = stop
        cached = self.cache[task.slot]
        if task.keys is None or cached is None:
            return accepted
        if len(cached.accepted):
            both = cached.accepted, accepted
            accepted = torch.cat(both) if len(accepted) else cached.accepted
        self.cache.put(task.slot, replace(cached, count=stop, accepted=accepted))
        return accepted
