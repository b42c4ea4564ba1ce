"""Talker stage, code predictor included: prepare, prefill and step, one codec frame a step."""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.inputs import rows_of
from qwen3_omni_neuron.engines.protocols import PredictorSampling, Talker
from qwen3_omni_neuron.engines.sampling import Ids, SampleIds, Sampler, allowed_ids
from qwen3_omni_neuron.events import FinishReason
from qwen3_omni_neuron.model.config import OmniConfig, TalkerConfig
from qwen3_omni_neuron.runtime.fairness import in_turn
from qwen3_omni_neuron.runtime.policy import AHEAD_ROWS, LEAST_CHUNK_ROWS, SchedulingPolicy
from qwen3_omni_neuron.runtime.prefix_cache import NO_ACCEPTED, CachedRows, PrefixCache
from qwen3_omni_neuron.runtime.request import LiveRequest
from qwen3_omni_neuron.runtime.runaway import end_probability
from qwen3_omni_neuron.runtime.spill import SlotSpill
from qwen3_omni_neuron.runtime.stage import Result, Shared, Stage, Task, Work

MAX_WAITING_FRAMES = 128  # frames not yet decoded by the vocoder, before the talker waits


class Phase(Enum):
    """Next call of the talker for a request."""

    PREPARE = auto()  # compute the prompt's rows that are known before the thinker answers
    PREFILL = auto()  # compute the rest of the prompt, once there is a first text token
    STEP = auto()  # append one text row, for one more frame


class TalkerTask(Task):
    """A request in the talker stage.

    prompt: the talker's part of the prompt. limit: largest number of codec tokens, the one that
    ends speech included. start: number of the prompt's user rows that its slot held before. row:
    token id of the text row that the next call appends, None until it has been taken from the
    buffer.
    """

    def __init__(self, live: LiveRequest, config: OmniConfig, allowed: Ids):
        super().__init__(live)
        assert config.talker is not None
        options = live.request.options
        self.prompt, self.speaker_id = live.request.prompt.talker, options.speaker_id(config)
        self.phase = Phase.PREPARE
        self.limit = options.talker_max_new_tokens
        self.start = 0
        self.row: int | None = None
        self._groups = config.talker.code_groups
        self._predictor = options.predictor_sampling()
        self.sampler = Sampler(
            options.talker_sampling(),
            config.talker.text.vocab_size,
            live.random.talker,
            allowed=allowed,
        )

    def predictor_sampling(self) -> PredictorSampling:
        """Draw the random numbers for codes 1 to 15 of one frame."""
        params = self._predictor
        uniforms = self.sampler.uniforms(self._groups - 1) if params.do_sample else None
        return PredictorSampling(uniforms, params.top_k, params.top_p)

    @property
    def speaks(self) -> bool:
        """False where frames of the talker's call in progress are not wanted any more."""
        return not (self.live.ended or self.live.speech_ended)

    @property
    def has_space(self) -> bool:
        """True where one more frame may wait for the vocoder, whose next chunk may be long."""
        return self.live.waiting_frames < max(MAX_WAITING_FRAMES, self.live.chunk_wanted)


class TalkerStage(Stage[TalkerTask]):
    """Worker of the talker. Between two frames it prepares and prefills one request each, or a few.

    A request whose next text row has not arrived is left out of the step, and does not change.
    """

    def __init__(
        self,
        engine: Talker,
        config: TalkerConfig,
        sample_ids: SampleIds,
        shared: Shared,
        policy: SchedulingPolicy,
        on_frame: Callable[[LiveRequest], None],
        spill: SlotSpill | None = None,
    ):
        """on_frame: called with the lock held, when a request has a new frame, or its last."""
        super().__init__("talker", shared)
        self._engine, self._config, self._on_frame = engine, config, on_frame
        self._sample_ids, self._policy = sample_ids, policy
        self._cache = PrefixCache(engine.slots, spill)
        self.allowed = allowed_ids(config.text.vocab_size, config.suppressed_ids)

    def _select(self) -> Work | float | None:
        for task in [task for task in self._tasks if task.live.speech_ended]:
            self._release(task)  # the vocoder has found that its speech runs away
        first = self._together(self._with_token(self._in_phase(Phase.PREFILL)))
        stepping = [task for task in self._tasks if task.phase is Phase.STEP and task.has_space]
        for task in stepping:
            if task.row is None and task.live.text.ready:
                task.row = task.live.text.take()
        stepping = [task for task in stepping if task.row is not None]
        lives = [task.live for task in stepping]
        held_s = self._policy.held_speech_s(lives, self._clock.now())
        stepping = [task for task in stepping if task.live not in held_s]
        new = self._in_phase(Phase.PREPARE)
        ahead = [task for task in new if task.live.request.ahead]
        new = [task for task in new if self._may_prepare(task)]
        new = self._together(in_turn(new, self._tasks))
        if not (first or stepping or new):
            new = self._next_ahead(ahead)
        copies = self._cache.may_copy_out and self._policy.nobody_starts
        if not (first or stepping or new or copies):
            return min(held_s.values(), default=None)
        return partial(self._work, first, stepping, new, copies)

    def _in_phase(self, phase: Phase) -> list[TalkerTask]:
        return [task for task in self._tasks if task.phase is phase]

    def _next_ahead(self, tasks: list[TalkerTask]) -> list[TalkerTask]:
        """Return the prompt to prefill ahead that the thinker has completed, in a pause."""
        ready = [task for task in tasks if task.live.accepted is not None][:1]
        if not ready:
            return []
        rows = self._chunk_rows(ready[0])
        return ready if self._policy.is_pause(rows) else []

    def _may_prepare(self, task: TalkerTask) -> bool:
        """Return whether a new request's prompt may be computed now, as far as it is known.

        A long prompt with media waits for their hidden states, where other requests run: its rows
        are then computed in chunks. The lock is held.
        """
        request = task.live.request
        if request.ahead:
            return False
        if task.live.accepted is not None or not self._may_be_cut(task):
            return True
        assert request.keys is not None
        keys = request.keys.talker
        if len(keys) <= LEAST_CHUNK_ROWS or not keys.media_rows(len(keys)):
            return True
        return len(keys) - self._cache.count(keys, request.options.cache_key) <= LEAST_CHUNK_ROWS

    def _may_be_cut(self, task: TalkerTask) -> bool:
        return len(self._tasks) > 1 and task.live.request.keys is not None

    def _chunk_rows(self, task: TalkerTask) -> int:
        """Return how many user rows of a prompt the next call computes.

        A talker row takes no longer than a thinker row, whose time is known. Media whose hidden
        states are not known are left to `Talker.prefill`. The lock is held.
        """
        rows, keys = len(task.prompt.token_ids) - task.start, task.live.request.keys
        if task.live.request.ahead:
            return min(rows, AHEAD_ROWS)
        if keys is None or not self._may_be_cut(task):
            return rows
        media = keys.talker.media_rows(len(keys.talker)) - keys.talker.media_rows(task.start)
        return rows if media and task.live.accepted is None else self._policy.chunk_rows(rows)

    def _with_token(self, tasks: list[TalkerTask]) -> list[TalkerTask]:
        """Return the prepared tasks whose first text token is there. The lock is held."""
        for task in tasks:
            if task.row is None and task.live.text.ready:
                task.row = task.live.text.take_first()
                if task.row is None:
                    self._finish(task, "no_speech")
        return [task for task in tasks if task.row is not None]

    def _together(self, tasks: list[TalkerTask]) -> list[TalkerTask]:
        """Return the first of the tasks, which the next work includes: see runtime.policy."""
        return tasks[: self._policy.together([len(t.prompt.token_ids) for t in tasks])]

    def _work(
        self,
        first: list[TalkerTask],
        stepping: list[TalkerTask],
        new: list[TalkerTask],
        copies: bool,
    ) -> None:
        """Make the next frames, a request's first one before all others."""
        self._speak(self._each(first, self._prefill))
        if new:
            done = [task for task, whole in self._each(new, self._prepare) if whole]
            prepared = self._without_ahead(done)
            for task in prepared:
                rows = len(task.prompt)
                task.limit = min(task.limit, self._engine.context_length - rows + 1)
                task.phase = Phase.PREFILL
            with self._lock:  # the thinker may have written a token meanwhile
                first = self._with_token([task for task in prepared if not task.live.ended])
            self._speak(self._each(first, self._prefill))
        if stepping:
            self._speak(self._call_engine(stepping, self._step))
        if copies:
            self._cache.copy_out()

    def _each(
        self, tasks: Sequence[TalkerTask], call: Callable[[Sequence[TalkerTask]], list[Result]]
    ) -> list[tuple[TalkerTask, Result]]:
        """Call the engine for each task alone."""
        return [pair for task in tasks for pair in self._call_engine((task,), call)]

    def _prepare(self, tasks: Sequence[TalkerTask]) -> list[bool]:
        """Compute prompts, or the next chunks of their user rows.

        Returns for each whether all of it is computed that is known.
        """
        whole = [self._prepare_one(task) for task in tasks]
        for task in tasks:
            task.prefilled_s = self._clock.now()
        return whole

    def _prepare_one(self, task: TalkerTask) -> bool:
        if not self._bring(task):
            return False
        rows, ahead = len(task.prompt.token_ids), task.live.request.ahead
        with self._lock:
            stop = task.start + self._chunk_rows(task)
        if stop == rows and not ahead:
            self._engine.prepare(task.slot, task.prompt, task.speaker_id, task.start)
            return True
        if task.start < stop:
            prompt, accepted = task.prompt.first(stop), self._accepted(task, stop)
            self._engine.prefill_chunk(task.slot, prompt, task.start, accepted)
        task.start = stop
        self._hold(task, stop)
        return stop == rows

    def _without_ahead(self, tasks: list[TalkerTask]) -> list[TalkerTask]:
        """End the tasks that are prefilled ahead. Returns the others."""
        with self._lock:
            for task in tasks:
                if task.live.request.ahead and task in self._tasks:
                    self._release(task)
        return [task for task in tasks if not task.live.request.ahead]

    def _bring(self, task: TalkerTask) -> bool:
        """Bring the user rows that are in the prefix cache into the slot of a task.

        Returns whether all are there; see PrefixCache.bring.
        """
        request = task.live.request
        if request.keys is None:
            return True
        keys, copy = request.keys.talker, self._engine.copy
        cached, whole = self._cache.bring(
            task.slot, keys, request.options.cache_key, len(keys), copy, self._prefill_s
        )
        task.start = cached.count
        return whole

    def _prefill_s(self, rows: int) -> float:
        """Return the expected time to compute rows: a thinker row takes no less."""
        with self._lock:
            return self._policy.expected_s(rows)

    def _hold(self, task: TalkerTask, count: int | None = None) -> None:
        """Record user rows of a slot's prompt in the prefix cache: so many, or all of them."""
        request = task.live.request
        if request.keys is not None:
            keys = request.keys.talker
            count = len(keys) if count is None else count
            self._cache.put(
                task.slot, CachedRows(keys, count, request.options.cache_key, NO_ACCEPTED)
            )

    def _accepted(self, task: TalkerTask, stop: int | None = None) -> Tensor:
        """Return the thinker's hidden states at the media of the rows from the task's start on.

        stop: row before which they end, where it is not the last one.
        """
        accepted, keys = task.live.accepted, task.live.request.keys
        if accepted is None:  # the thinker has not answered, so there are no media
            return NO_ACCEPTED
        if keys is None:
            return accepted
        end = None if stop is None else keys.talker.media_rows(stop)
        return accepted[keys.talker.media_rows(task.start) : end]

    def _prefill(self, tasks: Sequence[TalkerTask]) -> list[Tensor]:
        logits = []
        for task in tasks:
            assert task.row is not None
            logits.append(self._engine.prefill(task.slot, self._accepted(task), task.row))
            self._hold(task)
        return logits

    def _step(self, tasks: Sequence[TalkerTask]) -> Sequence[Tensor]:
        rows = [task.row for task in tasks if task.row is not None]
        return rows_of(self._engine.step([task.slot for task in tasks], rows))

    def _speak(self, speaking: list[tuple[TalkerTask, Tensor]]) -> None:
        """Make frames from logits: sample code 0 here, and the others in the code predictor."""
        code0: dict[TalkerTask, int] = {}
        sampling: dict[TalkerTask, PredictorSampling] = {}
        # A request that has ended during the step needs no code predictor.
        speaking = [(task, logits) for task, logits in speaking if task.speaks]
        if not speaking:
            return
        samplers = [task.sampler for task, _ in speaking]
        sampled = self._sample_ids(samplers, [logits for _, logits in speaking])
        may_end: dict[TalkerTask, float] = {}
        for (task, logits), code in zip(speaking, sampled, strict=True):
            task.phase, task.row = Phase.STEP, None
            ended = code == self._config.codec_eos_id
            if ended or len(task.live.codes) + 1 >= task.limit:
                with self._lock:
                    self._finish(task, "stop" if ended else "length")
            else:
                code0[task], sampling[task] = code, task.predictor_sampling()
                may_end[task] = self._end_probability(task, logits)
        if not code0:
            return

        def predict(tasks: Sequence[TalkerTask]) -> list[NDArray[np.int64]]:
            frames = self._engine.predict(
                [task.slot for task in tasks],
                [code0[task] for task in tasks],
                [sampling[task] for task in tasks],
            )
            return list(frames.numpy())

        predicted = self._call_engine(list(code0), predict)
        with self._lock:
            now = self._clock.now()
            for task, codes in predicted:
                if not task.speaks:
                    continue
                task.live.timestamps.progress_s = now
                task.live.frame_times.append(now)
                task.live.codes.append(codes)
                task.live.end_probabilities.append(may_end[task])
                self._on_frame(task.live)

    def _end_probability(self, task: TalkerTask, logits: Tensor) -> float:
        """Return LiveRequest.end_probabilities of the next frame."""
        live = task.live
        if not live.text.end_taken or live.request.options.runaway_speech == "keep":
            return 1.0
        end_id = self._config.codec_eos_id
        return end_probability(logits, task.sampler.params, self.allowed, end_id)

    def _finish(self, task: TalkerTask, why: FinishReason) -> None:
        """End a request's speech: no frame will follow. The lock is held."""
        if task in self._tasks:
            live = task.live
            live.end_speech(why)
            if why == "stop":
                live.request.pace.add(live.text.written, len(live.codes))
            self._release(task)
            self._on_frame(task.live)
