"""Thinker stage: prefill a prompt, step all requests, and pass on text tokens.

The encoder stage encodes long prompts' media: a 3-megapixel image takes hundreds of steps' time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from qwen3_omni_neuron.engines.inputs import rows_of
from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.noise import THINKER, Noise
from qwen3_omni_neuron.engines.protocols import Encoder, Thinker
from qwen3_omni_neuron.engines.sampling import (
    NOT_FINITE,
    Mask,
    SampleIds,
    Sampler,
    all_ids_but,
    is_finite,
    likeliest,
    log_probabilities,
)
from qwen3_omni_neuron.errors import EngineError
from qwen3_omni_neuron.model.config import GenerationDefaults, OmniConfig
from qwen3_omni_neuron.runtime.buffers import TextEnd
from qwen3_omni_neuron.runtime.grammar import ForcedTokens, GrammarState, wait_for_masks
from qwen3_omni_neuron.runtime.policy import SchedulingPolicy, in_turn
from qwen3_omni_neuron.runtime.prefill import (
    NO_ACCEPTED,
    CachedRows,
    PrefillStage,
    PrefixCache,
    PromptTask,
)
from qwen3_omni_neuron.runtime.request import MOST_WRITTEN, LiveRequest, Request
from qwen3_omni_neuron.runtime.stage import Shared, Stage, Task, Work
from qwen3_omni_neuron.runtime.stop_strings import CallWatch, StopStrings

MASK_WAIT_S = 0.005  # every request waits for missing masks
MASK_POLL_S = 0.002  # after that, only their requests wait
LONG_ROWS = 256  # 20 s of audio, or a quarter-megapixel image
MOST_TOKENS_ANEW = 256  # bytes of the longest text token


class ThinkerTask(PromptTask):
    """A request in the thinker stage.

    last: token that the next step appends, None before prefill. limit: most text tokens.
    next_since_s: when its prompt became the next to prefill. grammar: None before prefill, since
    grammars have as many processes as slots. no_end: mask of all tokens but those that end the
    text. logits: the last call's, until a token is sampled. full: the limit is reached, and the
    grammar may end there.
    """

    def __init__(
        self,
        live: LiveRequest,
        config: OmniConfig,
        defaults: GenerationDefaults,
        context_length: int,
    ):
        request = live.request
        prompt, options, codec = request.prompt, request.options, request.codec
        keys = None if request.keys is None else request.keys.thinker
        rows = len(prompt)
        # The first token is sampled from the last row's logits.
        super().__init__(live, rows, keys, rows if request.ahead else max(0, rows - 1))
        self.limit = min(options.thinker_max_new_tokens, context_length - rows)
        self.eos_ids = options.eos_ids(config)
        self.sampler = Sampler(
            options.sampling("thinker", defaults),
            config.thinker.text.vocab_size,
            Noise(live.seed, THINKER),
            prompt.token_ids,
        )
        self.no_end: Mask | None = None
        if options.goes_on:
            self.no_end = all_ids_but(config.thinker.text.vocab_size, self.eos_ids)
        texts = codec.decode, codec.encode_exactly
        self.stop = StopStrings(options.stop, *texts) if options.stop else None
        self.calls = CallWatch(*texts, request.thinks) if options.shown_tools else None
        self.grammar: GrammarState | ForcedTokens | None = None
        self.logits: Tensor | None = None
        self.full = False
        self.last: int | None = None
        self.begun = False
        self.next_since_s = math.inf

    @property
    def must_go_on(self) -> bool:
        """True if the next token must not end the text."""
        options = self.live.request.options
        return options.ignore_eos or len(self.live.token_ids) < options.thinker_min_new_tokens

    @property
    def is_due(self) -> bool:
        """True if its grammar lets it sample or ends it."""
        grammar = self.grammar
        if grammar is None or grammar.pending:
            return False
        return self.logits is not None or self.full or grammar.ended or grammar.error is not None

    @property
    def has_space(self) -> bool:
        """True if the next token fits, with tokens buffered for a stop string or call."""
        watches = [watch for watch in (self.stop, self.calls) if watch is not None]
        tokens = 1 + sum(watch.buffered + MOST_TOKENS_ANEW for watch in watches)
        tokens = min(tokens, MOST_WRITTEN)  # capacity of an empty buffer
        spoken = self.live.text.closed or self.live.text.may_put(tokens)
        return spoken and self.live.output.may_put(tokens)


class ThinkerStage(PrefillStage[ThinkerTask]):
    """Worker of the thinker. Between steps it prefills one new request, or a few short ones."""

    _engine: Thinker

    def __init__(
        self, engine: Thinker, sample_ids: SampleIds, shared: Shared, policy: SchedulingPolicy
    ):
        super().__init__("thinker", engine, shared, policy)
        self._sample_ids = sample_ids

    def _select(self) -> Work | float | None:
        now, delays = self._clock.now(), list[float]()
        due, missing = self._look_at_masks()
        if missing:
            delays.append(MASK_POLL_S)
        new = self._next_prompts(now)
        if new:
            rows, since_s = sum(map(self._chunk_rows, new)), new[0].next_since_s
            delay_s = self._policy.prefill_delay_s(new[0].live, rows, since_s, now)
            if delay_s:
                new = []
                delays.append(delay_s)
        ready = [
            task
            for task in self._tasks
            if task.last is not None and task.has_space and task not in (*due, *missing)
        ]
        delayed = self._policy.delayed_steps_s([task.live for task in ready], now)
        writing = [task for task in ready if task.live not in delayed]
        delays += delayed.values()
        self._delays = bool(delays) or (not new and any(t.live.request.ahead for t in self._tasks))
        if not new and not writing and not due:
            return min(delays, default=None)
        return partial(self._work, new, writing, due)

    def _look_at_masks(self) -> tuple[list[ThinkerTask], list[ThinkerTask]]:
        states = [task.grammar for task in self._tasks if task.grammar is not None]
        if not states:
            return [], []
        wait_for_masks(states, 0.0)
        due = [task for task in self._tasks if task.is_due]
        waiting = [task for task in self._tasks if task.logits is not None or task.full]
        return due, [task for task in waiting if task not in due]

    def _next_prompts(self, now: float) -> list[ThinkerTask]:
        waiting = [
            task
            for task in self._tasks
            if task.last is None and task.logits is None and not task.live.encoding
        ]
        prompts = [task for task in waiting if not task.live.request.ahead]
        if prompts:
            prompts = in_turn(prompts, self._tasks)
            prompts = prompts[: self._policy.together([self._chunk_rows(p) for p in prompts])]
        else:
            prompts = self._in_pause(waiting)
        for task in prompts:
            task.next_since_s = min(task.next_since_s, now)
        return prompts

    def _may_be_cut(self, task: ThinkerTask) -> bool:
        # In the thinker's calls, an image would be encoded again for each.
        prompt = task.live.request.prompt
        return task.live.encoded is not None or not (prompt.images or prompt.videos)

    def _work(
        self, new: list[ThinkerTask], writing: list[ThinkerTask], due: list[ThinkerTask]
    ) -> None:
        self._sample(due)
        for task, (whole, accepted) in self._each(new, self._prefill):
            if not whole:
                continue
            ahead = task.live.request.ahead
            with self._lock:
                task.live.accepted = accepted
                if ahead:
                    task.live.text.close()  # wakes the talker's stage
                    self._release(task)
            if not ahead:
                self._sample([task])
        if new:
            with self._lock:
                lives = [task.live for task in writing]
                delayed = self._policy.delayed_steps_s(lives, self._clock.now())
                writing = [task for task in writing if task.live not in delayed]
        if writing:
            start_s = self._clock.now()
            stepped = self._call_engine(writing, self._step)
            with self._lock:
                self._policy.step_s = self._clock.now() - start_s
            for task, logits in stepped:
                task.logits = logits
            self._sample([task for task, _ in stepped])

    def _sample(self, tasks: Sequence[ThinkerTask]) -> None:
        """Sample and pass on next tokens. Requests without a mask keep their logits."""
        wait_for_masks([task.grammar for task in tasks if task.grammar is not None], MASK_WAIT_S)
        ready, logits = list[ThinkerTask](), list[Tensor]()
        for task in tasks:
            if task.grammar is not None and task.grammar.pending:
                assert task.logits is not None
                task.logits = task.logits.clone()  # the engine may reuse its memory
            elif self._has_mask(task) and task.logits is not None:
                ready.append(task)
                logits.append(task.logits)
        if ready:
            token_ids = self._sample_ids([task.sampler for task in ready], logits)
            for task, token_id in zip(ready, token_ids, strict=True):
                task.finite = token_id != NOT_FINITE
                self._write(task, token_id)

    def _has_mask(self, task: ThinkerTask) -> bool:
        """Give a sampler its mask. Ends a request that can't continue."""
        grammar = task.grammar
        if grammar is None:
            task.sampler.mask = task.no_end if task.must_go_on else None
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

    def _compute(self, task: ThinkerTask, start: int, stop: int) -> Tensor:
        live, grammar = task.live, task.live.request.grammar
        if grammar is not None and task.grammar is None and not live.request.ahead:
            # Its mask is computed during prefill.
            task.grammar = grammar.begin(task.eos_ids, task.limit)
        if not task.begun:
            task.begun, live.cached_rows = True, start
        if start == stop and live.request.ahead:  # wholly cached
            task.finite = True
            return NO_ACCEPTED
        prompt, encoded = live.request.prompt, live.encoded
        if stop < task.rows:
            token_ids, positions = prompt.token_ids[:stop], prompt.positions[:, :stop]
            prompt = replace(prompt, token_ids=token_ids, positions=positions)
        if encoded is not None and task.media_rows(encoded.start) > task.media_rows(start):
            encoded = None  # lacks rows that the slot has since lost
        start_s = self._clock.now()
        logits, accepted = self._engine.prefill(task.slot, prompt, start, encoded)
        with self._lock:
            now = self._clock.now()
            self._policy.prefilled(live, stop - start, now - start_s, now)
        task.logits = logits if stop == task.rows else None
        if live.request.ahead or stop < task.rows:  # nothing is sampled from these logits
            task.finite = is_finite(logits)
        return accepted

    def _release(self, task: ThinkerTask) -> None:
        """Drop a request; its slot has the reply but the last token. The lock is held."""
        if task.logits is not None:  # a row without a sample: a grammar ended the text
            task.finite = is_finite(task.logits)
        cached, appended = self.cache[task.slot], task.live.token_ids[:-1]
        if cached is not None and task.last is not None and appended:
            keys = cached.keys.followed_by(appended)
            self.cache.put(task.slot, CachedRows(keys, len(keys), cached.accepted))
        if task.grammar is not None:
            task.grammar.close()
        super()._release(task)

    def _step(self, tasks: Sequence[ThinkerTask]) -> Sequence[Tensor]:
        tokens = [task.last for task in tasks if task.last is not None]
        for task in tasks:
            task.finite = False  # until a token is sampled
        return rows_of(self._engine.step([task.slot for task in tasks], tokens))

    def _write(self, task: ThinkerTask, token_id: int | None) -> None:
        """Pass on a token; None: the text has ended."""
        live, logprob, others = task.live, None, list[tuple[int, float]]()
        options = live.request.options
        logits, task.logits = task.logits, None
        if token_id is not None:
            task.last = token_id
            if options.logprobs and logits is not None and token_id != NOT_FINITE:
                (logprob,) = log_probabilities(logits, [token_id])
                others = likeliest(logits, options.top_logprobs) if options.top_logprobs else []
        with self._lock:
            if live.ended:
                return
            if token_id == NOT_FINITE or (logprob is not None and math.isnan(logprob)):
                step = f"text token {len(live.token_ids) + 1}"
                live.end(EngineError.not_finite("thinker", step))
                return
            live.timestamps.progress_s = self._clock.now()
            if token_id is not None:
                if live.timestamps.first_token_s is None:
                    live.timestamps.first_token_s = live.timestamps.progress_s
                live.token_ids.append(token_id)
            if logprob is not None:
                live.logprobs.append(logprob)
                live.top_logprobs.append(others)
            try:
                ended = self._pass_on(task, token_id)
            except Exception as error:  # such as a malformed call
                live.end(error)
                return
            if ended:
                live.output.put(TextEnd())
                live.text.close()
                self._release(task)

    def _pass_on(self, task: ThinkerTask, token_id: int | None) -> bool:
        """Release tokens that need no buffering. Returns whether the reply ends.

        The lock is held. Raises ToolCallError.
        """
        live, grammar = task.live, task.grammar
        forced = isinstance(grammar, ForcedTokens) and grammar.mask is not None
        is_end, stopped = token_id in task.eos_ids and not forced, False
        given = [] if is_end or token_id is None else [token_id]
        if task.stop is not None and given:
            given, stopped = task.stop.push(given[0])
        ended = is_end or (token_id is None and grammar is not None and grammar.ended)
        if stopped or (ended and (grammar is None or not grammar.closed)):
            live.thinker_finish = "stop"
        last = ended or stopped or token_id is None
        if not last:
            task.full = len(live.token_ids) == task.limit
            if grammar is not None and token_id is not None:
                grammar.push(token_id)
            # The grammar's answer decides whether the reply ends there.
            last = task.full and (grammar is None or not grammar.pending)
        if last and task.stop is not None and not stopped:
            given += task.stop.flush()
        spoken = given
        if task.calls is not None:
            given, spoken = task.calls.push(given, last, is_end)
        for given_id in given:
            live.output.put(given_id)
        for spoken_id in spoken:
            live.text.put(spoken_id)
        if is_end and token_id is not None:
            live.output.put(token_id)
        if task.calls is not None and task.calls.begun:
            live.text.close()
        return last


def takes_long(request: Request) -> bool:
    """Return whether the encoder stage encodes a request's media."""
    prompt = request.prompt
    return prompt.audio_tokens + prompt.image_tokens > LONG_ROWS and not request.ahead


class EncoderStage(Stage[Task]):
    """Worker of the encoders, one prompt at a time.

    cache: rows of the thinker's slots. on_encoded: called with the lock held.
    """

    def __init__(
        self, engine: Encoder, cache: PrefixCache, shared: Shared, on_encoded: Callable[[], None]
    ):
        super().__init__("encoder", shared)
        self._engine, self._cache, self._on_encoded = engine, cache, on_encoded

    def _select(self) -> Work | None:
        waiting = in_turn(self._tasks, self._tasks)
        return partial(self._work, waiting[0]) if waiting else None

    def _work(self, task: Task) -> None:
        encoded = self._call_engine((task,), self._encode)
        with self._lock:
            if encoded and task in self._tasks:
                ((_, task.live.encoded),) = encoded
                task.live.encoding = False
                self._release(task)
                self._on_encoded()

    def _encode(self, tasks: Sequence[Task]) -> list[PromptMedia | None]:
        requests = [task.live.request for task in tasks]
        return [self._engine.encode(x.prompt, self._start(x)) for x in requests]

    def _start(self, request: Request) -> int:
        if request.keys is None:
            return 0
        return self._cache.count(request.keys.thinker)
