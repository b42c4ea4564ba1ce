"""Thinker stage: prefill one prompt, step all requests, and pass on their text tokens."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import Thinker
from qwen3_omni_neuron.runtime.buffers import TextEnd
from qwen3_omni_neuron.runtime.request import LiveRequest
from qwen3_omni_neuron.runtime.sampling import Sampler, draw_ids
from qwen3_omni_neuron.runtime.stage import Shared, Stage, Task, Work

MOST_TOKENS_ANEW = 256  # bytes of the longest token of text


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
        self.stop = None if wanted.stop_strings is None else wanted.stop_strings()
        self.last: int | None = None

    @property
    def has_space(self) -> bool:
        """True where the next token can be put for the talker and for the caller.

        With it go the tokens that were held for a stop string, and what the last of them is
        tokenised anew to: at most a token for each of its bytes.
        """
        tokens = 1 if self.stop is None else self.stop.held + 1 + MOST_TOKENS_ANEW
        return self.live.text.has_space_for(tokens) and self.live.output.has_space_for(tokens)


class ThinkerStage(Stage[ThinkerTask]):
    """Worker of the thinker. Between two steps it prefills at most one new request."""

    def __init__(self, engine: Thinker, shared: Shared):
        super().__init__("thinker", shared)
        self._engine = engine

    def _select(self) -> Work | None:
        new = next((task for task in self._tasks if task.last is None), None)
        writing = [task for task in self._tasks if task.last is not None and task.has_space]
        if new is None and not writing:
            return None
        return partial(self._work, new, writing)

    def _work(self, new: ThinkerTask | None, writing: list[ThinkerTask]) -> None:
        if new is not None:
            for task, (logits, accepted) in self._call_engine((new,), self._prefill):
                self._write(task, draw_ids((task.sampler,), logits)[0], accepted)
        if writing:
            stepped = self._call_engine(writing, self._step)
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
            spoken, end_ids = [token_id], live.request.thinker.eos_ids
            if token_id in end_ids:
                live.thinker_finish = "stop"
                spoken = [] if task.stop is None else task.stop.flush()
            elif task.stop is not None:
                spoken, stopped = task.stop.push(token_id)
                if stopped:
                    live.thinker_finish = "stop"
                elif len(live.token_ids) == task.limit:
                    spoken += task.stop.flush()
            for spoken_id in spoken:
                live.output.put(spoken_id)
                live.text.put(spoken_id)
            if token_id in end_ids:
                live.output.put(token_id)
            if live.thinker_finish == "stop" or len(live.token_ids) == task.limit:
                live.output.put(TextEnd())
                live.text.close()
                self._release(task)
