"""Talker stage, including the code predictor: one frame per step."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.inputs import rows_of
from qwen3_omni_neuron.engines.noise import TALKER, Noise
from qwen3_omni_neuron.engines.protocols import PredictorSampling, Talker
from qwen3_omni_neuron.engines.sampling import (
    NOT_FINITE,
    Ids,
    SampleIds,
    Sampler,
    allowed_ids,
    is_finite,
)
from qwen3_omni_neuron.errors import EngineError
from qwen3_omni_neuron.events import FinishReason
from qwen3_omni_neuron.model.config import OmniConfig, TalkerConfig
from qwen3_omni_neuron.runtime.policy import LEAST_CHUNK_ROWS, SchedulingPolicy, in_turn
from qwen3_omni_neuron.runtime.prefill import NO_ACCEPTED, PrefillStage, PromptTask
from qwen3_omni_neuron.runtime.request import LiveRequest
from qwen3_omni_neuron.runtime.runaway import end_probability
from qwen3_omni_neuron.runtime.stage import Shared, Work

MAX_WAITING_FRAMES = 128  # to decode


class Phase(Enum):
    """Next call of the talker for a request."""

    PREPARE = auto()  # compute the rows known before the thinker answers
    PREFILL = auto()  # the rest, after the first text token
    STEP = auto()  # append one text row, for one frame


class TalkerTask(PromptTask):
    """A request in the talker stage.

    prompt: the talker's part, whose user rows may be cached. limit: most codec tokens, end code
    included. row: token id of the next call's text row, None until it arrives.
    """

    def __init__(self, live: LiveRequest, config: OmniConfig, allowed: Ids, context_length: int):
        assert config.talker is not None
        request, options = live.request, live.request.options
        self.prompt, self.speaker_id = request.prompt.talker, options.speaker_id(config)
        keys = None if request.keys is None else request.keys.talker
        rows = len(self.prompt.token_ids)
        super().__init__(live, rows, keys, rows)
        self.phase = Phase.PREPARE
        self.limit = min(options.talker_max_new_tokens, context_length - len(self.prompt) + 1)
        self.row: int | None = None
        self._predictor = options.sampling("predictor")
        self.sampler = Sampler(
            options.sampling("talker"),
            config.talker.text.vocab_size,
            Noise(live.seed, TALKER),
            allowed=allowed,
        )

    def predictor_sampling(self) -> PredictorSampling:
        """Return the sampling of codes 1 to 15 of the next frame. The lock is held."""
        params, frame = self._predictor, len(self.live.codes)
        noise = self.sampler.noise.at(frame) if params.do_sample else None
        # A first chunk does not wait for the next step.
        known = self.speaks and self.live.chunks and self.take_row()
        return PredictorSampling(noise, params.top_k, params.top_p, self.row if known else None)

    def take_row(self) -> bool:
        """Take the next call's row; return whether it has arrived. The lock is held."""
        if self.row is None and self.live.text.ready:
            self.row = self.live.text.take()
        return self.row is not None

    @property
    def speaks(self) -> bool:
        """False if its frames are no longer wanted."""
        return not (self.live.ended or self.live.speech_ended)

    @property
    def has_space(self) -> bool:
        """True if the vocoder's queue has space for a frame."""
        return self.live.waiting_frames < max(MAX_WAITING_FRAMES, self.live.chunk_wanted)


class TalkerStage(PrefillStage[TalkerTask]):
    """Worker of the talker. Between frames it prepares and prefills a request or a few."""

    _engine: Talker

    def __init__(
        self,
        engine: Talker,
        config: TalkerConfig,
        sample_ids: SampleIds,
        shared: Shared,
        policy: SchedulingPolicy,
        on_frame: Callable[[LiveRequest], None],
    ):
        """on_frame: called with the lock held, for a new frame or the end."""
        super().__init__("talker", engine, shared, policy)
        self._config, self._sample_ids, self._on_frame = config, sample_ids, on_frame
        self.allowed = allowed_ids(config.text.vocab_size, config.suppressed_ids)

    def _select(self) -> Work | float | None:
        for task in [task for task in self._tasks if task.live.speech_ended]:
            self._release(task)  # its speech runs away
        first = self._together(self._with_token(self._in_phase(Phase.PREFILL)))
        speaking = self._in_phase(Phase.STEP)
        stepping = [task for task in speaking if task.has_space]
        stepping = [task for task in stepping if task.take_row()]
        lives = [task.live for task in stepping]
        delayed = self._policy.delayed_speech_s(lives, self._clock.now())
        stepping = [task for task in stepping if task.live not in delayed]
        preparing = self._in_phase(Phase.PREPARE)
        new = [task for task in preparing if self._may_prepare(task)]
        new = self._together(in_turn(new, self._tasks))
        ahead = [task for task in preparing if task.live.request.ahead]
        self._delays = bool(delayed or ahead) or not all(task.has_space for task in speaking)
        if not (first or stepping or new):
            new = self._in_pause([task for task in ahead if task.live.accepted is not None])
        if not (first or stepping or new):
            return min(delayed.values(), default=None)
        return partial(self._work, first, stepping, new)

    def _in_phase(self, phase: Phase) -> list[TalkerTask]:
        return [task for task in self._tasks if task.phase is phase]

    def _may_prepare(self, task: TalkerTask) -> bool:
        """Return whether a new request's prompt may be computed now.

        Beside other requests, a long prompt with media waits for its media's hidden states, so that
        it can be computed in chunks.
        """
        if task.live.request.ahead:
            return False
        if len(self._tasks) == 1 or task.keys is None or self._may_be_cut(task):
            return True
        short = task.rows <= LEAST_CHUNK_ROWS
        return short or task.rows - self.cache.count(task.keys) <= LEAST_CHUNK_ROWS

    def _may_be_cut(self, task: TalkerTask) -> bool:
        # Media without hidden states are left to `Talker.prefill`.
        start = task.live.prefilled_rows[self.name]
        media = task.media_rows(task.rows) - task.media_rows(start)
        return task.live.accepted is not None or not media

    def _with_token(self, tasks: list[TalkerTask]) -> list[TalkerTask]:
        for task in tasks:
            if task.row is None and task.live.text.ready:
                task.row = task.live.text.take_first()
                if task.row is None:
                    self._finish(task, "no_speech")
        return [task for task in tasks if task.row is not None]

    def _together(self, tasks: list[TalkerTask]) -> list[TalkerTask]:
        return tasks[: self._policy.together([task.rows for task in tasks])]

    def _work(
        self, first: list[TalkerTask], stepping: list[TalkerTask], new: list[TalkerTask]
    ) -> None:
        self._speak(self._each(first, self._begin))
        if new:
            prepared = [task for task, (whole, _) in self._each(new, self._prefill) if whole]
            with self._lock:  # the thinker may have written a token
                for task in prepared:
                    if task.live.request.ahead:
                        self._release(task)
                waiting = [task for task in prepared if task.phase is Phase.PREFILL]
                first = self._with_token([task for task in waiting if not task.live.ended])
            self._speak(self._each(first, self._begin))
        if stepping:
            self._speak(self._call_engine(stepping, self._step))

    def _compute(self, task: TalkerTask, start: int, stop: int) -> Tensor | None:
        if stop == task.rows and not task.live.request.ahead:
            self._engine.prepare(task.slot, task.prompt, task.speaker_id, start)
            task.phase = Phase.PREFILL
            return None
        if start < stop:
            prompt, accepted = task.prompt.first(stop), self._accepted(task, start, stop)
            self._engine.prefill_chunk(task.slot, prompt, start, accepted)
        task.finite = True
        return NO_ACCEPTED

    def _accepted(self, task: TalkerTask, start: int, stop: int) -> Tensor:
        accepted = task.live.accepted
        if accepted is None:  # no media
            return NO_ACCEPTED
        media = slice(task.media_rows(start), task.media_rows(stop))
        return accepted if task.keys is None else accepted[media]

    def _begin(self, task: TalkerTask) -> Tensor:
        assert task.row is not None
        accepted = self._accepted(task, task.live.prefilled_rows[self.name], task.rows)
        logits = self._engine.prefill(task.slot, accepted, task.row)
        self._put(task, task.rows)
        return logits

    def _step(self, tasks: Sequence[TalkerTask]) -> Sequence[Tensor]:
        rows = [task.row for task in tasks if task.row is not None]
        for task in tasks:
            task.finite = False  # until a code is sampled
        return rows_of(self._engine.step([task.slot for task in tasks], rows))

    def _speak(self, speaking: Iterable[tuple[TalkerTask, Tensor]]) -> None:
        # An ended request needs no code predictor.
        stepped, speaking = list(speaking), list[tuple[TalkerTask, Tensor]]()
        for task, logits in stepped:
            if task.speaks:
                speaking.append((task, logits))
            else:
                task.finite = is_finite(logits)
        if not speaking:
            return
        samplers = [task.sampler for task, _ in speaking]
        sampled = self._sample_ids(samplers, [logits for _, logits in speaking])
        begun: dict[TalkerTask, tuple[int, float]] = {}  # by task: code 0, the end's probability
        for (task, logits), code in zip(speaking, sampled, strict=True):
            task.phase, task.row, task.finite = Phase.STEP, None, code != NOT_FINITE
            if not task.finite:
                self._end_not_finite(task, "talker", 0)
                continue
            ended = code == self._config.codec_eos_id
            if ended or len(task.live.codes) + 1 >= task.limit:
                with self._lock:
                    self._finish(task, "stop" if ended else "length")
            else:
                begun[task] = code, self._end_probability(task, logits)
        if not begun:
            return

        def predict(tasks: Sequence[TalkerTask]) -> list[NDArray[np.int64]]:
            with self._lock:
                sampling = [task.predictor_sampling() for task in tasks]
            slots, code0 = [task.slot for task in tasks], [begun[task][0] for task in tasks]
            return list(self._engine.predict(slots, code0, sampling).numpy())

        predicted = self._call_engine(list(begun), predict)
        with self._lock:
            now = self._clock.now()
            for task, codes in predicted:
                if not task.speaks:
                    continue
                if (codes < 0).any():
                    self._end_not_finite(task, "code predictor", int((codes < 0).argmax()))
                    continue
                task.live.timestamps.progress_s = now
                task.live.frame_times.append(now)
                task.live.codes.append(codes)
                task.live.end_probabilities.append(begun[task][1])
                self._on_frame(task.live)

    def _end_not_finite(self, task: TalkerTask, stage: str, code: int) -> None:
        """End a request whose next frame has non-finite logits of a code."""
        step = f"code {code} of frame {len(task.live.codes) + 1}"
        with self._lock:
            task.live.end(EngineError.not_finite(stage, step))

    def _end_probability(self, task: TalkerTask, logits: Tensor) -> float:
        live = task.live
        if not live.text.end_taken or live.request.options.runaway_speech == "keep":
            return 1.0
        end_id = self._config.codec_eos_id
        return end_probability(logits, task.sampler.params, self.allowed, end_id)

    def _finish(self, task: TalkerTask, why: FinishReason) -> None:
        """End a request's speech. The lock is held."""
        if task in self._tasks:
            live = task.live
            live.end_speech(why)
            if why == "stop":
                live.request.pace.add(live.text.written, len(live.codes))
            self._release(task)
            self._on_frame(task.live)
