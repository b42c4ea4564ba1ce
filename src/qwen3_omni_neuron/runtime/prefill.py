"""Prefill of prompts, shared by the thinker and talker stages.

A slot keeps its last request's rows: only rows after a shared beginning are computed, in chunks if
other requests run. Other slots' rows are copied. After an error, or if a row may not be finite, the
slot is cleared.
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
COPY_ROWS = 16  # computing fewer takes about as long as copying


@dataclass(frozen=True, eq=False)
class CachedRows:
    """The first `count` rows of a prompt, in one slot.

    keys: the whole prompt's. accepted: the thinker's accept-layer hidden states [media, hidden] at
    these rows' media positions.
    """

    keys: RowKeys
    count: int
    accepted: Tensor


class PrefixCache:
    """Rows cached in the slots of one engine.

    The stage's thread writes it. Any thread may `choose` and `count` without a lock: records are
    immutable, and `bring` compares again.
    """

    def __init__(self, slots: int):
        self._rows: list[CachedRows | None] = [None] * slots

    def __getitem__(self, slot: int) -> CachedRows | None:
        return self._rows[slot]

    def put(self, slot: int, rows: CachedRows | None) -> None:
        """Set a slot's record."""
        self._rows[slot] = rows

    def choose(self, free: Sequence[int], keys: RowKeys) -> tuple[int, int]:
        """Choose a free slot, least recently used first. Returns it and `count`.

        Prefers the slot that shares the most rows with the prompt, unless most of its rows are
        others, which later turns may need. Otherwise the first slot, to which `bring` copies rows.
        """
        counts = self._counts(keys)
        best = max(free, key=lambda slot: counts[slot])
        cached = self._rows[best]
        in_place = cached is not None and 2 * counts[best] >= cached.count
        return best if in_place else free[0], max(counts)

    def count(self, keys: RowKeys) -> int:
        """Return how many of a prompt's first rows any slot has."""
        return max(self._counts(keys))

    def bring(
        self, slot: int, keys: RowKeys, most: int, copy: Callable[[int, int, int], None]
    ) -> CachedRows:
        """Copy a prompt's first rows, at most `most`, from the slot that has the most.

        copy: see Thinker.copy.
        """
        counts = self._counts(keys)
        source = counts.index(max(counts))
        if counts[source] < counts[slot] + COPY_ROWS:
            source = slot
        count, cached = min(counts[source], most), self._rows[source]
        accepted = NO_ACCEPTED if cached is None else cached.accepted[: keys.media_rows(count)]
        if source != slot:
            self.put(slot, None)
            copy(source, slot, count)
        rows = CachedRows(keys, count, accepted)
        self.put(slot, rows)
        return rows

    def _counts(self, keys: RowKeys) -> list[int]:
        return [0 if r is None else min(r.count, r.keys.shared(keys)) for r in self._rows]


class PromptTask(Task):
    """Request in a stage that computes its prompt.

    rows: prompt rows that may be cached. keys: None without a prefix cache. most: upper bound of
    rows from the cache. finite: all computed rows are known to be finite; None before the first.
    """

    def __init__(self, live: LiveRequest, rows: int, keys: RowKeys | None, most: int):
        super().__init__(live)
        self.rows, self.keys, self.most = rows, keys, most
        self.finite: bool | None = None

    def media_rows(self, rows: int) -> int:
        """Count media rows among the first `rows`."""
        return 0 if self.keys is None else self.keys.media_rows(rows)


AnyPrompt = TypeVar("AnyPrompt", bound=PromptTask)


class PrefillStage(Stage[AnyPrompt]):
    """Base of the stages whose engine computes prompts."""

    _engine: Thinker | Talker

    def __init__(
        self, name: str, engine: Thinker | Talker, shared: Shared, policy: SchedulingPolicy
    ):
        super().__init__(name, shared)
        self._engine, self._policy = engine, policy
        self.cache = PrefixCache(engine.slots)
        self._to_clear = set[int]()  # slots whose rows may not be finite

    @abstractmethod
    def _compute(self, task: AnyPrompt, start: int, stop: int) -> Tensor | None:
        """Compute rows of a prompt.

        Returns their media's hidden states; None if a later call completes the rows.
        """

    @abstractmethod
    def _may_be_cut(self, task: AnyPrompt) -> bool:
        """Return whether a call may compute a part of the remaining rows."""

    def _chunk_rows(self, task: AnyPrompt) -> int:
        rows = task.rows - min(task.live.prefilled_rows[self.name], task.most)
        if task.live.request.ahead:
            return min(rows, AHEAD_ROWS)
        if task.keys is None or not self._may_be_cut(task):
            return rows
        only_task = len(self._tasks) == 1
        return self._policy.chunk_rows(task.live, rows, only_task, self._clock.now())

    def _in_pause(self, ahead: Sequence[AnyPrompt]) -> list[AnyPrompt]:
        return [task for task in ahead[:1] if self._policy.is_pause(self._chunk_rows(task))]

    def _each(
        self, tasks: Sequence[AnyPrompt], call: Callable[[AnyPrompt], Result]
    ) -> Iterator[tuple[AnyPrompt, Result]]:
        for task in tasks:
            yield from self._call_engine((task,), lambda tasks: [call(task) for task in tasks])

    def _prefill(self, task: AnyPrompt) -> tuple[bool, Tensor]:
        """Copy a prompt's cached rows into its slot; compute the next ones.

        Returns whether all known rows are computed, and its media's hidden states.
        """
        start, stop = 0, task.rows
        if task.slot in self._to_clear:
            self._engine.clear(task.slot)
            self._to_clear.remove(task.slot)
        task.finite = False
        if task.keys is None:
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

    def _release(self, task: AnyPrompt) -> None:
        """Drop a request, and its rows after an error or a possibly infinite value."""
        if task.finite is not None and not (task.finite and task.live.error is None):
            self.cache.put(task.slot, None)
            self._to_clear.add(task.slot)
        super()._release(task)

    def _put(self, task: AnyPrompt, stop: int, accepted: Tensor = NO_ACCEPTED) -> Tensor:
        """Record that a slot contains a prompt's rows up to `stop`.

        accepted: hidden states [media, hidden] of the last computed rows. Returns all rows' states.
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
