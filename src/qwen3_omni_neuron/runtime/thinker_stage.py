"""Thinker stage: prefill one prompt, step all requests, and pass on their text tokens."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import Thinker
from qwen3_omni_neuron.runtime.buffers import TextEnd
from qwen3_omni_neuron.runtime.priority import RightOfWay
from qwen3_omni_neuron.runtime.request import LiveRequest
from qwen3_omni_neuron.runtime.sampling import Sampler, draw_ids
from qwen3_omni_neuron.runtime.stage import Shared, Stage, Task, Work


class ThinkerTask(Task):
    """A request in the thinker stage.

    last: the token that the next step appends, None before the prefill. limit: most tokens of text.
    next_since_s: when its prompt became the next one to prefill.
    """

    def __init__(self, live: LiveRequest, vocab_size: int, context_length: int):
        super().__init__(live)
        wanted = live.request.thinker
        self.limit = min(wanted.max_new_tokens, context_length - len(wanted.prompt))
        generator, history = live.random.thinker, wanted.prompt.token_ids
        self.sampler = Sampler(wanted.sampling, vocab_size, generator, history)
        self.last: int | None = None
        self.next_since_s: float | None = None

    @property
    def has_space(self) -> bool:
        """True where one more token can be put for the talker and for the caller."""
        return self.live.text.has_space and self.live.output.has_space_for_token


class ThinkerStage(Stage[ThinkerTask]):
    """Worker of the thinker. Between two steps it prefills at most one new request."""

    def __init__(self, engine: Thinker, shared: Shared, right_of_way: RightOfWay):
        super().__init__("thinker", shared)
        self._engine, self._right_of_way = engine, right_of_way
        self._holds = False  # whether the last selection held something back

    def on_frame(self) -> None:
        """Wake this stage where it waits for a new frame (runtime.priority). The lock is held."""
        if self._holds:
            self.changed.notify_all()

    def _select(self) -> Work | float | None:
        now, holds = self._clock.now(), []
        new = next((task for task in self._tasks if task.last is None), None)
        if new is not None:
            if new.next_since_s is None:
                new.next_since_s = now
            rows = len(new.live.request.thinker.prompt)
            hold_s = self._right_of_way.prefill_hold_s(new.live, rows, new.next_since_s, now)
            if hold_s:
                new = None
                holds.append(hold_s)
        writing = []
        for task in self._tasks:
            if task.last is not None and task.has_space:
                hold_s = self._right_of_way.step_hold_s(task.live, now)
                if hold_s:
                    holds.append(hold_s)
                else:
                    writing.append(task)
        self._holds = bool(holds)
        if new is None and not writing:
            return min(holds, default=None)
        return partial(self._work, new, writing)

    def _work(self, new: ThinkerTask | None, writing: list[ThinkerTask]) -> None:
        if new is not None:
            for task, (logits, accepted) in self._call_engine((new,), self._prefill):
                self._write(task, draw_ids((task.sampler,), logits)[0], accepted)
            with self._lock:  # the request may have become a starter
                now = self._clock.now()
                writing = [t for t in writing if not self._right_of_way.step_hold_s(t.live, now)]
        if writing:
            start_s = self._clock.now()
            stepped = self._call_engine(writing, self._step)
            self._right_of_way.stepped(self._clock.now() - start_s)
            if stepped:
                logits = torch.cat([logits for _, logits in stepped])
                token_ids = draw_ids([task.sampler for task, _ in stepped], logits)
                for (task, _), token_id in zip(stepped, token_ids, strict=True):
                    self._write(task, token_id)

    def _prefill(self, tasks: Sequence[ThinkerTask]) -> list[tuple[Tensor, Tensor]]:
        (task,) = tasks
        prompt, start_s = task.live.request.thinker.prompt, self._clock.now()
        found = self._engine.prefill(task.slot, prompt)
        self._right_of_way.prefilled(len(prompt), self._clock.now() - start_s)
        return [found]

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
