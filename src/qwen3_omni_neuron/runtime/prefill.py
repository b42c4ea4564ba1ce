"""Prefill of prompts, in which the thinker's stage and the talker's are alike.

The rows of a prompt that the prefix cache has are brought into its slot, and the others are
computed, in chunks where other requests run. A prompt that is prefilled ahead of its request is
computed in pauses (runtime.policy).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import Talker, Thinker
from qwen3_omni_neuron.prompt.row_keys import RowKeys
from qwen3_omni_neuron.runtime.policy import AHEAD_ROWS, SchedulingPolicy
from qwen3_omni_neuron.runtime.prefix_cache import NO_ACCEPTED, PrefixCache
from qwen3_omni_neuron.runtime.request import LiveRequest
from qwen3_omni_neuron.runtime.stage import Result, Shared, Stage, Task


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

    def _bring(self, task: AnyPrompt) -> tuple[int, int]:
        """Bring the rows of a prompt that the prefix cache has into its slot.

        Returns how many rows the slot holds, and the row before which the engine's next call ends.
        """
        if task.keys is None:  # one call computes all rows
            task.live.prefilled_rows[self.name] = task.rows
            return 0, task.rows
        count = self.cache.bring(task.slot, task.keys, task.most, self._engine.copy).count
        task.live.prefilled_rows[self.name] = count
        with self._lock:
            return count, count + self._chunk_rows(task)

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
