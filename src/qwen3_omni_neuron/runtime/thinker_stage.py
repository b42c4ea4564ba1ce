"""Thinker stage: prefill one prompt, step all requests, and pass on their text tokens."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import Thinker
from qwen3_omni_neuron.runtime.buffers import TextEnd
from qwen3_omni_neuron.runtime.held_rows import HeldRows, Rows
from qwen3_omni_neuron.runtime.request import LiveRequest
from qwen3_omni_neuron.runtime.sampling import Sampler, draw_ids
from qwen3_omni_neuron.runtime.stage import Shared, Stage, Task, Work


class ThinkerTask(Task):
    """A request in the thinker stage.

    last: the token that the next step appends, None before the prefill. limit: most tokens of text.
    """

    def __init__(self, live: LiveRequest, vocab_size: int, context_length: int):
        super().__init__(live)
        wanted = live.request.thinker
        self.limit = min(wanted.max_new_tokens, context_length - len(wanted.prompt))
        generator, history = live.random.thinker, wanted.prompt.token_ids
        self.sampler = Sampler(wanted.sampling, vocab_size, generator, history)
        self.last: int | None = None

    @property
    def has_space(self) -> bool:
        """True where one more token can be put for the talker and for the caller."""
        return self.live.text.has_space and self.live.output.has_space_for_token


class ThinkerStage(Stage[ThinkerTask]):
    """Worker of the thinker. Between two steps it prefills at most one new request.

    held: the prompts' and replies' rows in each slot.
    """

    def __init__(self, engine: Thinker, shared: Shared, admit_warm_up: Callable[[], None]):
        """admit_warm_up: called with the lock held; adds a task for one, where it may run now."""
        super().__init__("thinker", shared)
        self._engine, self._admit_warm_up = engine, admit_warm_up
        self.held = HeldRows(engine.slots, shared.lock)

    def _select(self) -> Work | None:
        self._admit_warm_up()
        new = next((task for task in self._tasks if task.last is None), None)
        writing = [task for task in self._tasks if task.last is not None and task.has_space]
        if new is None and not writing:
            return None
        return partial(self._work, new, writing)

    def _work(self, new: ThinkerTask | None, writing: list[ThinkerTask]) -> None:
        if new is not None:
            for task, (logits, accepted) in self._call_engine((new,), self._prefill):
                if task.live.request.warm_up:
                    self._end_warm_up(task, accepted)
                else:
                    self._write(task, draw_ids((task.sampler,), logits)[0], accepted)
        if writing:
            stepped = self._call_engine(writing, self._step)
            if stepped:
                logits = torch.cat([logits for _, logits in stepped])
                token_ids = draw_ids([task.sampler for task, _ in stepped], logits)
                for (task, _), token_id in zip(stepped, token_ids, strict=True):
                    self._write(task, token_id)

    def _prefill(self, tasks: Sequence[ThinkerTask]) -> list[tuple[Tensor, Tensor]]:
        return [self._prefill_rest(task) for task in tasks]

    def _prefill_rest(self, task: ThinkerTask) -> tuple[Tensor, Tensor]:
        """Prefill the rows that no slot holds. Returns as Thinker.prefill, of all rows."""
        request = task.live.request
        prompt, keys, slot = request.thinker.prompt, request.keys, task.slot
        if keys is None:
            return self._engine.prefill(slot, prompt)
        # The first token is drawn from the last row's logits, so that this row is never reused.
        most = len(prompt) if request.warm_up else max(0, len(prompt) - 1)
        held = self.held.bring(slot, keys.thinker, request.cache_key, most, self._engine.copy)
        task.live.reused_rows = start = len(held.keys)
        if request.warm_up and start == len(prompt):
            return torch.empty(0), held.accepted
        logits, accepted = self._engine.prefill(slot, prompt, start)
        if len(held.accepted):
            accepted = torch.cat((held.accepted, accepted))
        self.held.put(slot, Rows(keys.thinker, request.cache_key, accepted))
        return logits, accepted

    def _release(self, task: ThinkerTask) -> None:
        """Drop a request, whose slot holds all but the last token, too. The lock is held."""
        held, appended = self.held[task.slot], task.live.token_ids[:-1]
        if held is not None and task.last is not None and appended:
            keys = held.keys.followed_by(appended)
            self.held.put(task.slot, Rows(keys, held.cache_key, held.accepted))
        super()._release(task)

    def _end_warm_up(self, task: ThinkerTask, accepted: Tensor) -> None:
        """Pass the rows at media positions to the talker."""
        with self._lock:
            if not task.live.ended:
                task.live.accepted = accepted
                task.live.text.close()  # wakes the talker's stage
                self._release(task)

    def _step(self, tasks: Sequence[ThinkerTask]) -> Sequence[Tensor]:
        tokens = [task.last for task in tasks if task.last is not None]
        return self._engine.step([task.slot for task in tasks], tokens).split(1)

    def _write(self, task: ThinkerTask, token_id: int, accepted: Tensor | None = None) -> None:
        """Pass a token to the caller and, unless it is an end marker, to the talker."""
        task.last = token_id
        live = task.live
        with self._lock:
            if live.ended:
                return
            live.timestamps.progress_s = self._clock.now()
            if accepted is not None:
                live.accepted = accepted
                live.timestamps.first_token_s = live.timestamps.progress_s
            live.token_ids.append(token_id)
            live.output.put(token_id)
            if token_id in live.request.thinker.eos_ids:
                live.thinker_finish = "stop"
            else:
                live.text.put(token_id)
            if live.thinker_finish == "stop" or len(live.token_ids) == task.limit:
                live.output.put(TextEnd())
                live.text.close()
                self._release(task)
