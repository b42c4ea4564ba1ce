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
from qwen3_omni_neuron.engines.sampling import SampleIds, Sampler, log_probability
from qwen3_omni_neuron.errors import Qwen3OmniError
from qwen3_omni_neuron.model.config import GenerationDefaults, OmniConfig
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.runtime.buffers import TextEnd
from qwen3_omni_neuron.runtime.fairness import in_turn
from qwen3_omni_neuron.runtime.grammar import GrammarState, wait_for_masks
from qwen3_omni_neuron.runtime.policy import AHEAD_ROWS, SchedulingPolicy
from qwen3_omni_neuron.runtime.prefix_cache import CachedRows, PrefixCache
from qwen3_omni_neuron.runtime.request import MOST_WRITTEN, LiveRequest
from qwen3_omni_neuron.runtime.spill import SlotSpill
from qwen3_omni_neuron.runtime.stage import Shared, Stage, Task, Work
from qwen3_omni_neuron.runtime.stop_strings import StopStrings
from qwen3_omni_neuron.runtime.tool_calls import CallWatch

MASK_WAIT_S = 0.005  # how long all requests wait for the masks of a step
MASK_POLL_S = 0.002  # interval of looks at a mask for which its request alone waits
MOST_TOKENS_ANEW = 256  # bytes of the longest text token


class ThinkerTask(Task):
    """A request in the thinker stage.

    last: the token that the next step appends, None before the prefill. limit: largest number of
    text tokens. eos_ids: tokens that end the text. begun: whether its prefill has begun.
    next_since_s: when its prompt became the next one to prefill, infinity before. stop, calls,
    grammar: watches over its tokens; None where it has no stop string, tool or grammar. held: the
    last call's logits and accept-layer hidden states, while the mask for them is missing. full: it
    has reached its limit, and it is not known yet whether its grammar ends there, too.
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
        request = live.request
        self.calls: CallWatch | None = None
        if options.shown_tools:
            self.calls = CallWatch(codec.decode, codec.encode_words, request.thinks)
        self.grammar: GrammarState | None = None
        if request.grammar is not None and not request.ahead:
            self.grammar = request.grammar.begin(self.eos_ids)
        self.held: tuple[Tensor, Tensor | None] | None = None
        self.full = False
        self.last: int | None = None
        self.begun = False
        self.next_since_s = math.inf

    @property
    def rows(self) -> int:
        """Expected number of the prompt's rows that are still to be computed.

        At least 1, since the last row's logits give the first token; a prefill ahead may have 0.
        """
        request = self.live.request
        least = 0 if request.ahead else 1
        return max(least, len(request.prompt) - self.live.prefilled_rows)

    @property
    def is_due(self) -> bool:
        """True where its grammar lets it go on from `held`, or end."""
        grammar = self.grammar
        if grammar is None or grammar.pending:
            return False
        return self.held is not None or self.full or grammar.ended or grammar.error is not None

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

        The tokens that were held for a stop string or a call are put with it. The last of them may
        be tokenised anew, to at most one token for each of its bytes. A longer call than an empty
        buffer takes is put nevertheless.
        """
        watches = [watch for watch in (self.stop, self.calls) if watch is not None]
        tokens = 1 + sum(watch.held + MOST_TOKENS_ANEW for watch in watches)
        tokens = min(tokens, MOST_WRITTEN)  # capacity of an empty buffer
        spoken = self.live.text.closed or self.live.text.may_put(tokens)
        return spoken and self.live.output.may_put(tokens)


class ThinkerStage(Stage[ThinkerTask]):
    """Worker of the thinker. Between two steps it prefills one new request, or a few short ones.

    A long prompt has a chunked prefill, unless there is no other request. cache: prefix cache, with
    the rows of prompts and replies.
    """

    def __init__(
        self,
        engine: Thinker,
        sample_ids: SampleIds,
        shared: Shared,
        policy: SchedulingPolicy,
        spill: SlotSpill | None = None,
    ):
        super().__init__("thinker", shared)
        self._engine, self._sample_ids, self._policy = engine, sample_ids, policy
        self._holds = False  # whether the last selection held a request back
        self.cache = PrefixCache(engine.slots, spill)

    def on_frame(self) -> None:
        """Wake this stage where it waits for a new frame (runtime.policy). The lock is held."""
        if self._holds:
            self.changed.notify_all()

    def _select(self) -> Work | float | None:
        now, holds = self._clock.now(), list[float]()
        due, missing = self._look_at_masks()
        if missing:
            holds.append(MASK_POLL_S)
        new = self._next_prompts(now)
        if new:
            rows, since_s = sum(map(self._chunk_rows, new)), new[0].next_since_s
            hold_s = self._policy.prefill_hold_s(new[0].live, rows, since_s, now)
            if hold_s:
                new = []
                holds.append(hold_s)
        ready = [
            task
            for task in self._tasks
            if task.last is not None and task.has_space and task not in (*due, *missing)
        ]
        held_s = self._policy.held_steps_s([task.live for task in ready], now)
        writing = [task for task in ready if task.live not in held_s]
        holds += held_s.values()
        self._holds = bool(holds)
        copies = self.cache.may_copy_out and self._policy.nobody_starts
        if not new and not writing and not due and not copies:
            return min(holds, default=None)
        return partial(self._work, new, writing, due, copies)

    def _look_at_masks(self) -> tuple[list[ThinkerTask], list[ThinkerTask]]:
        """Ask for masks. Return tasks that can go on or end by one, and those that wait for one."""
        states = [task.grammar for task in self._tasks if task.grammar is not None]
        if not states:
            return [], []
        wait_for_masks(states, 0.0)
        due = [task for task in self._tasks if task.is_due]
        waiting = [task for task in self._tasks if task.held is not None or task.full]
        return due, [task for task in waiting if task not in due]

    def _next_prompts(self, now: float) -> list[ThinkerTask]:
        """Return the tasks whose prompts are prefilled next; ahead only in a pause."""
        waiting = [
            task
            for task in self._tasks
            if task.last is None and task.held is None and not task.live.encoding
        ]
        prompts = [task for task in waiting if not task.live.request.ahead]
        if prompts:
            prompts = in_turn(prompts, self._tasks)
            prompts = prompts[: self._policy.together([self._chunk_rows(p) for p in prompts])]
        elif waiting and self._policy.is_pause(self._chunk_rows(waiting[0])):
            prompts = waiting[:1]
        for task in prompts:
            task.next_since_s = min(task.next_since_s, now)
        return prompts

    def _chunk_rows(self, task: ThinkerTask) -> int:
        """Return how many rows of a prompt the next call computes."""
        if task.live.request.ahead:
            return min(task.rows, AHEAD_ROWS)
        cut = len(self._tasks) > 1 and task.live.request.keys is not None and task.may_be_cut
        return self._policy.chunk_rows(task.rows) if cut else task.rows

    def _work(
        self,
        new: list[ThinkerTask],
        writing: list[ThinkerTask],
        due: list[ThinkerTask],
        copies: bool,
    ) -> None:
        self._go_on(due)
        for one in new:
            for task, (logits, accepted) in self._call_engine((one,), self._prefill):
                task.prefilled_s = self._clock.now()
                if task.live.prefilled_rows < len(task.live.request.prompt):
                    continue
                if task.live.request.ahead:
                    self._end_ahead(task, accepted)
                else:
                    self._sample([(task, logits, accepted)])
        if new:
            with self._lock:  # the requests may have become starters
                lives = [task.live for task in writing]
                held_s = self._policy.held_steps_s(lives, self._clock.now())
                writing = [task for task in writing if task.live not in held_s]
        if writing:
            start_s = self._clock.now()
            stepped = self._call_engine(writing, self._step)
            with self._lock:
                self._policy.stepped(self._clock.now() - start_s)
            self._sample([(task, logits, None) for task, logits in stepped])
        if copies:
            self.cache.copy_out()

    def _sample(self, computed: list[tuple[ThinkerTask, Tensor, Tensor | None]]) -> None:
        """Sample the next tokens from a call's logits, and pass them on.

        Masks were made during the call. A request whose mask is still missing after a short wait
        keeps its logits, and the others go on without it.
        """
        states = [task.grammar for task, *_ in computed if task.grammar is not None]
        if states:
            wait_for_masks(states, MASK_WAIT_S)
        ready = []
        for task, logits, accepted in computed:
            if task.grammar is not None and task.grammar.pending:
                # The engine may use the memory of its results again.
                task.held = logits.clone(), None if accepted is None else accepted.clone()
            elif self._has_mask(task):
                ready.append((task, logits, accepted))
        if ready:
            samplers = [task.sampler for task, *_ in ready]
            token_ids = self._sample_ids(samplers, [logits for _, logits, _ in ready])
            for (task, logits, accepted), token_id in zip(ready, token_ids, strict=True):
                self._write(task, token_id, logits, accepted)

    def _go_on(self, due: list[ThinkerTask]) -> None:
        """Let requests go on for which a mask has come, or end."""
        computed = []
        for task in due:
            held, task.held = task.held, None
            if held is not None:
                computed.append((task, *held))
            else:
                self._has_mask(task)
        if computed:
            self._sample(computed)

    def _has_mask(self, task: ThinkerTask) -> bool:
        """Give a request's sampler its mask. Ends the request that can't or need not go on."""
        grammar = task.grammar
        if grammar is None:
            return True
        if grammar.error is not None:
            with self._lock:
                task.live.end(grammar.error)
            return False
        if grammar.ended or task.full:
            self._write(task, None)
            return False
        task.sampler.mask = grammar.mask
        return True

    def _prefill(self, tasks: Sequence[ThinkerTask]) -> list[tuple[Tensor, Tensor]]:
        return [self._prefill_rest(task) for task in tasks]

    def _prefill_rest(self, task: ThinkerTask) -> tuple[Tensor, Tensor]:
        """Prefill rows of a prompt that no slot holds: all of them, or the next chunk.

        Returns what Thinker.prefill returns, but with the hidden states of all media rows that the
        slot now holds.
        """
        request = task.live.request
        prompt, keys, slot = request.prompt, request.keys, task.slot
        if keys is None:
            task.live.prefilled_rows = len(prompt)
            return self._prefilled(slot, prompt, 0, task.live.encoded)
        rows = len(prompt)
        # The last row is always computed, because the first token is sampled from its logits.
        most = rows if request.ahead else max(0, rows - 1)
        cache_key = request.options.cache_key
        cached, whole = self.cache.bring(
            slot, keys.thinker, cache_key, most, self._engine.copy, self._policy.expected_s
        )
        start = cached.count
        if not task.begun:
            task.begun, task.live.cached_rows = whole, start
        task.live.prefilled_rows = start
        rows = min(rows, start + self._chunk_rows(task))
        if not whole or (request.ahead and start == rows):
            return torch.empty(0), cached.accepted
        if rows < len(prompt):
            token_ids, positions = prompt.token_ids[:rows], prompt.positions[:, :rows]
            prompt = replace(prompt, token_ids=token_ids, positions=positions)
        encoded, media_rows = task.live.encoded, keys.thinker.media_rows
        if encoded is not None and media_rows(encoded.start) > media_rows(start):
            encoded = None  # the slot has since lost rows that it leaves out
        logits, accepted = self._prefilled(slot, prompt, start, encoded)
        task.live.prefilled_rows = rows
        if len(cached.accepted):
            accepted = torch.cat((cached.accepted, accepted))
        self.cache.put(slot, CachedRows(keys.thinker, rows, cache_key, accepted))
        return logits, accepted

    def _prefilled(
        self, slot: int, prompt: Prompt, start: int, encoded: PromptMedia | None
    ) -> tuple[Tensor, Tensor]:
        """Call the engine's prefill, and note how long it takes."""
        start_s = self._clock.now()
        found = self._engine.prefill(slot, prompt, start, encoded)
        with self._lock:
            self._policy.prefilled(len(prompt) - start, self._clock.now() - start_s)
        return found

    def _release(self, task: ThinkerTask) -> None:
        """Drop a request. Its slot holds the reply without the last token. The lock is held."""
        cached, appended = self.cache[task.slot], task.live.token_ids[:-1]
        if cached is not None and task.last is not None and appended:
            keys = cached.keys.followed_by(appended)
            rows = CachedRows(keys, len(keys), cached.cache_key, cached.accepted)
            self.cache.put(task.slot, rows)
        if task.grammar is not None:
            task.grammar.close()
        super()._release(task)

    def _end_ahead(self, task: ThinkerTask, accepted: Tensor) -> None:
        """Pass the hidden states at media positions of a prompt prefilled ahead to the talker."""
        with self._lock:
            if not task.live.ended:
                task.live.accepted = accepted
                task.live.text.close()  # wakes the talker's stage
                self._release(task)

    def _step(self, tasks: Sequence[ThinkerTask]) -> Sequence[Tensor]:
        tokens = [task.last for task in tasks if task.last is not None]
        return rows_of(self._engine.step([task.slot for task in tasks], tokens))

    def _write(
        self,
        task: ThinkerTask,
        token_id: int | None,
        logits: Tensor | None = None,
        accepted: Tensor | None = None,
    ) -> None:
        """Pass a token to the caller and, unless it is an end marker, to the talker.

        token_id: None where the text has ended with the token before. logits: those that it was
        sampled from. accepted: what the prefill returned.
        """
        live = task.live
        logprob = None
        if token_id is not None:
            task.last = token_id
            if live.request.options.logprobs and logits is not None:
                logprob = log_probability(logits, token_id)
        with self._lock:
            if live.ended:
                return
            live.timestamps.progress_s = self._clock.now()
            if accepted is not None:
                live.accepted = accepted
                live.timestamps.first_token_s = live.timestamps.progress_s
            if token_id is not None:
                live.token_ids.append(token_id)
            if logprob is not None:
                live.logprobs.append(logprob)
            try:
                ended = self._pass_on(task, token_id)
            except Qwen3OmniError as error:  # a call of a tool has failed
                live.end(error)
                return
            if ended:
                live.output.put(TextEnd())
                live.text.close()
                self._release(task)

    def _pass_on(self, task: ThinkerTask, token_id: int | None) -> bool:
        """Put the tokens that are no longer held. Returns whether the reply ends.

        token_id: the token that was written, None where the text has ended with the one before.
        The lock is held. Raises ToolCallError.
        """
        live, grammar = task.live, task.grammar
        is_end, stopped = token_id in task.eos_ids, False
        given = [] if is_end or token_id is None else [token_id]
        if task.stop is not None and given:
            given, stopped = task.stop.push(given[0])
        if is_end or stopped or (token_id is None and grammar is not None and grammar.ended):
            live.thinker_finish = "stop"
        last = live.thinker_finish == "stop" or token_id is None
        if not last:
            task.full = len(live.token_ids) == task.limit
            if grammar is not None and token_id is not None:
                grammar.push(token_id)
            # Where its grammar is asked, the answer says whether the reply ends by that.
            last = task.full and (grammar is None or not grammar.pending)
        if last and task.stop is not None and not stopped:
            given += task.stop.flush()
        spoken = given
        if task.calls is not None:
            given, spoken = task.calls.push(given, last)
        for given_id in given:
            live.output.put(given_id)
        for spoken_id in spoken:
            live.text.put(spoken_id)
        if is_end and token_id is not None:
            live.output.put(token_id)
        if task.calls is not None and task.calls.begun:
            live.text.close()
        return last
