"""The thinker's stage: prompts in, text tokens out."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import Thinker
from qwen3_omni_neuron.runtime.output import TextEnd
from qwen3_omni_neuron.runtime.request import LiveRequest
from qwen3_omni_neuron.runtime.sampling import Sampler, draw_ids
from qwen3_omni_neuron.runtime.stage import Shared, Stage, Task, Work


class ThinkerTask(Task):
    """last: the token that the next step appends, None before the prefill."""

    def __init__(self, live: LiveRequest, vocab_size: int, context_length: int):
        super().__init__(live)
        wanted = live.request.thinker
        self.limit = min(wanted.max_new_tokens, context_length - len(wanted.prompt))
        generator, history = live.random.thinker, wanted.prompt.token_ids
        self.sampler = Sampler(wanted.sampling, vocab_size, generator, history)
        self.last: int | None = None

    @property
    def has_room(self) -> bool:
        return self.live.text.has_room and self.live.output.has_room_for_token


class ThinkerStage(Stage[ThinkerTask]):
    """Between two steps it prefills one request, where one has come."""

    def __init__(self, engine: Thinker, shared: Shared):
        super().__init__("thinker", shared)
        self._engine = engine

    def _select(self) -> Work | None:
        new = next((task for task in self._tasks if task.last is None), None)
        writing = [task for task in self._tasks if task.last is not None and task.has_room]
        if new is None and not writing:
            return None
        return partial(self._work, new, writing)

    def _work(self, new: ThinkerTask | None, writing: list[ThinkerTask]) -> None:
        if new is not None:
            for task, (logits, accepted) in self._call((new,), self._prefill):
                self._write(task, draw_ids((task.sampler,), logits)[0], accepted)
        if writing:
            stepped = self._call(writing, self._step)
            if stepped:
                logits = torch.cat([logits for _, logits in stepped])
                token_ids = draw_ids([task.sampler for task, _ in stepped], logits)
                for (task, _), token_id in zip(stepped, token_ids, strict=True):
                    self._write(task, token_id)

    def _prefill(self, tasks: Sequence[ThinkerTask]) -> list[tuple[Tensor, Tensor]]:
        return [self._engine.prefill(task.slot, task.live.request.thinker.prompt) for task in tasks]

    def _step(self, tasks: Sequence[ThinkerTask]) -> Sequence[Tensor]:
        tokens = [task.last for task in tasks if task.last is not None]
        return self._engine.step([task.slot for task in tasks], tokens).split(1)

    def _write(self, task: ThinkerTask, token_id: int, accepted: Tensor | None = None) -> None:
        """Hand a token on: to the caller, and but for the end marker to the talker."""
        task.last = token_id
        live = task.live
        with self._lock:
            if live.ended:
                return
            live.marks.progress_s = self._clock.now()
            if accepted is not None:
                live.accepted = accepted
                live.marks.first_token_s = live.marks.progress_s
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
