"""Thinker stage: prefill one prompt, step all requests, and pass on their text tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.inputs import rows_of
from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.protocols import Thinker
from qwen3_omni_neuron.engines.sampling import DrawIds, Sampler
from qwen3_omni_neuron.model.config import GenerationDefaults, OmniConfig
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.runtime.buffers import TextEnd
from qwen3_omni_neuron.runtime.held_rows import HeldRows, Rows
from qwen3_omni_neuron.runtime.priority import RightOfWay
from qwen3_omni_neuron.runtime.request import MOST_WRITTEN, LiveRequest
from qwen3_omni_neuron.runtime.stage import Shared, Stage, Task, Work
from qwen3_omni_neuron.runtime.stop_strings import StopStrings
from qwen3_omni_neuron.runtime.turns import fewest_slots_first

MOST_TOKENS_ANEW = 256  # bytes of the longest text token
WARM_UP_ROWS = 128  # most rows of a warm-up's call; a window of speech has 104


class ThinkerTask(Task):
    """A request in the thinker stage.

    last: the token that the next step appends, None before the prefill. limit: largest number of
    text tokens. eos_ids: tokens that end the text. begun: whether its prefill has begun.
    next_since_s: when its prompt became the next one to prefill, infinity before.
    """

    def __init__(
        self,
        live: LiveRequest,
        config: OmniConfig,
        defaults: GenerationDefaults,
        context_length: int,
    ):
        super().__init__(live)
        prompt, options, codec = live.request.prompt, live.request.options, live.request.codec
        self.limit = min(options.thinker_max_new_tokens, context_length - len(prompt))
        self.eos_ids = options.eos_ids(config)
        self.sampler = Sampler(
            options.thinker_sampling(defaults),
            config.thinker.text.vocab_size,
            live.random.thinker,
            prompt.token_ids,
        )
        self.stop: StopStrings | None = None
        if options.stop:
            self.stop = StopStrings(options.stop, codec.decode, codec.encode_words)
        self.last: int | None = None
        self.begun = False
        self.next_since_s = math.inf

    @property
    def rows(self) -> int:
        """Expected number of the prompt's rows that are still to be computed.

        At least 1, since the last row's logits give the first token; a warm-up may have 0.
        """
        request = self.live.request
        least = 0 if request.warm_up else 1
        return max(least, len(request.prompt) - self.live.prefilled_rows)

    @property
    def may_be_cut(self) -> bool:
        """True where a part of its prompt can be prefilled by itself.

        An image that is encoded in the thinker's calls would be encoded again for each part.
        """
        prompt = self.live.request.prompt
        return self.live.encoded is not None or not (prompt.images or prompt.videos)

    @property
    def has_space(self) -> bool:
        """True where the talker's and the caller's buffers have space for the next token.

        The tokens that were held for a stop string are put with it. The last of them may be
        tokenised anew, to at most one token for each of its bytes.
        """
        tokens = 1 if self.stop is None else self.stop.held + 1 + MOST_TOKENS_ANEW
        tokens = min(tokens, MOST_WRITTEN)  # capacity of an empty buffer
        return self.live.text.may_put(tokens) and self.live.output.may_put(tokens)


class ThinkerStage(Stage[ThinkerTask]):
    """Worker of the thinker. Between two steps it prefills one new request, or a few short ones.

    A long prompt is prefilled in pieces, unless there is no other request (see `RightOfWay.piece`).
    held: record of the prompt and reply rows in each slot.
    """

    def __init__(
        self, engine: Thinker, draw_ids: DrawIds, shared: Shared, right_of_way: RightOfWay
    ):
        super().__init__("thinker", shared)
        self._engine, self._draw_ids, self._right_of_way = engine, draw_ids, right_of_way
        self._holds = False  # whether the last selection held a request back
        self.held = HeldRows(engine.slots)

    def on_frame(self) -> None:
        """Wake this stage where it waits for a new frame (runtime.priority). The lock is held."""
        if self._holds:
            self.changed.notify_all()

    def _select(self) -> Work | float | None:
        now, holds = self._clock.now(), []
        new = self._next_prompts(now)
        if new:
            rows, since_s = sum(map(self._piece, new)), new[0].next_since_s
            hold_s = self._right_of_way.prefill_hold_s(new[0].live, rows, since_s, now)
            if hold_s:
                new = []
                holds.append(hold_s)
        ready = [task for task in self._tasks if task.last is not None and task.has_space]
        held_s = self._right_of_way.held_steps_s([task.live for task in ready], now)
        writing = [task for task in ready if task.live not in held_s]
        holds += held_s.values()
        self._holds = bool(holds)
        if not new and not writing:
            return min(holds, default=None)
        return partial(self._work, new, writing)

    def _next_prompts(self, now: float) -> list[ThinkerTask]:
        """Return the tasks whose prompts are prefilled next; a warm-up only in a pause."""
        waiting = [task for task in self._tasks if task.last is None and not task.live.encoding]
        prompts = [task for task in waiting if not task.live.request.warm_up]
        if prompts:
            prompts = fewest_slots_first(prompts, self._tasks)
            prompts = prompts[: self._right_of_way.together([self._piece(p) for p in prompts])]
        elif waiting:
            expected_s = self._right_of_way.expected_s(min(waiting[0].rows, WARM_UP_ROWS))
            prompts = waiting[:1] if self._right_of_way.may_warm(expected_s, now) else []
        for task in prompts:
            task.next_since_s = min(task.next_since_s, now)
        return prompts

    def _piece(self, task: ThinkerTask) -> int:
        """Return how many rows of a prompt the next call computes."""
        cut = len(self._tasks) > 1 and task.live.request.keys is not None and task.may_be_cut
        return self._right_of_way.piece(task.rows) if cut else task.rows

    def _work(self, new: list[ThinkerTask], writing: list[ThinkerTask]) -> None:
        for one in new:
            for task, (logits, accepted) in self._call_engine((one,), self._prefill):
                if task.live.request.warm_up:
                    self._warmed_up(task, accepted)
                elif task.live.prefilled_rows == len(task.live.request.prompt):
                    self._write(task, self._draw_ids([task.sampler], [logits])[0], accepted)
        if new:
            with self._lock:  # the requests may have become starters
                lives = [task.live for task in writing]
                held_s = self._right_of_way.held_steps_s(lives, self._clock.now())
                writing = [task for task in writing if task.live not in held_s]
        if writing:
            start_s = self._clock.now()
            stepped = self._call_engine(writing, self._step)
            with self._lock:
                self._right_of_way.stepped(self._clock.now() - start_s)
            if stepped:
                samplers = [task.sampler for task, _ in stepped]
                token_ids = self._draw_ids(samplers, [logits for _, logits in stepped])
                for (task, _), token_id in zip(stepped, token_ids, strict=True):
                    self._write(task, token_id)

    def _prefill(self, tasks: Sequence[ThinkerTask]) -> list[tuple[Tensor, Tensor]]:
        return [self._prefill_rest(task) for task in tasks]

    def _prefill_rest(self, task: ThinkerTask) -> tuple[Tensor, Tensor]:
        """Prefill rows of a prompt that no slot holds: all of them, or the next piece.

        A warm-up's piece has at most WARM_UP_ROWS. Returns what Thinker.prefill returns, but with
        the hidden states of all media rows that the slot now holds.
        """
        request = task.live.request
        prompt, keys, slot = request.prompt, request.keys, task.slot
        if keys is None:
            task.live.prefilled_rows = len(prompt)
            return self._prefilled(slot, prompt, 0, task.live.encoded)
        rows = len(prompt)
        # The last row is never reused, because the first token is drawn from its logits.
        most = rows if request.warm_up else max(0, rows - 1)
        cache_key = request.options.cache_key
        held = self.held.bring(slot, keys.thinker, cache_key, most, self._engine.copy)
        start = held.count
        if not task.begun:
            task.begun, task.live.reused_rows = True, start
        task.live.prefilled_rows = start
        rows = min(rows, start + (WARM_UP_ROWS if request.warm_up else self._piece(task)))
        if request.warm_up and start == rows:
            return torch.empty(0), held.accepted
        if rows < len(prompt):
            token_ids, positions = prompt.token_ids[:rows], prompt.positions[:, :rows]
            prompt = replace(prompt, token_ids=token_ids, positions=positions)
        encoded, media_rows = task.live.encoded, keys.thinker.media_rows
        if encoded is not None and media_rows(encoded.start) > media_rows(start):
            encoded = None  # the slot has since lost rows that it leaves out
        logits, accepted = self._prefilled(slot, prompt, start, encoded)
        task.live.prefilled_rows = rows
        if len(held.accepted):
            accepted = torch.cat((held.accepted, accepted))
        self.held.put(slot, Rows(keys.thinker, rows, cache_key, accepted))
        return logits, accepted

    def _prefilled(
        self, slot: int, prompt: Prompt, start: int, encoded: PromptMedia | None
    ) -> tuple[Tensor, Tensor]:
        """Call the engine's prefill, and note how long it takes."""
        start_s = self._clock.now()
        found = self._engine.prefill(slot, prompt, start, encoded)
        with self._lock:
            self._right_of_way.prefilled(len(prompt) - start, self._clock.now() - start_s)
        return found

    def _release(self, task: ThinkerTask) -> None:
        """Drop a request. Its slot holds the reply but for the last token. The lock is held."""
        held, appended = self.held[task.slot], task.live.token_ids[:-1]
        if held is not None and task.last is not None and appended:
            keys = held.keys.followed_by(appended)
            self.held.put(task.slot, Rows(keys, len(keys), held.cache_key, held.accepted))
        super()._release(task)

    def _warmed_up(self, task: ThinkerTask, accepted: Tensor) -> None:
        """Pass a complete warm-up's hidden states at media positions to the talker."""
        held = self.held[task.slot]
        task.live.reused_rows = task.live.prefilled_rows = held.count if held else 0
        with self._lock:
            if not task.live.ended and not task.rows:
                task.live.accepted = accepted
                task.live.text.close()  # wakes the talker's stage
                self._release(task)

    def _step(self, tasks: Sequence[ThinkerTask]) -> Sequence[Tensor]:
        tokens = [task.last for task in tasks if task.last is not None]
        return rows_of(self._engine.step([task.slot for task in tasks], tokens))

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
            spoken, end_ids = [token_id], task.eos_ids
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
