"""Vocoder stage: decode frames to audio chunks, sized by runtime.schedule."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.protocols import Vocoder
from qwen3_omni_neuron.errors import EngineError
from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk
from qwen3_omni_neuron.runtime.policy import SchedulingPolicy
from qwen3_omni_neuron.runtime.request import RECENT_FRAMES, LiveRequest, frame_pace
from qwen3_omni_neuron.runtime.runaway import Runaway, RunawayGuard
from qwen3_omni_neuron.runtime.schedule import Pace, Schedule
from qwen3_omni_neuron.runtime.stage import Shared, Stage, Task, Work

logger = logging.getLogger(__name__)


class VocoderTask(Task):
    """A request in the vocoder stage.

    samples: number of decoded samples. chunk: frames of the next chunk. guard: None until a frame
    after the whole text was decoded.
    """

    def __init__(self, live: LiveRequest, schedule: Schedule):
        super().__init__(live)
        self.schedule = schedule
        self.samples = self.chunk = 0
        self.guard: RunawayGuard | None = None


class VocoderStage(Stage[VocoderTask]):
    """Worker of the vocoder. It decodes due chunks of one size in one batch."""

    def __init__(
        self,
        engine: Vocoder,
        shared: Shared,
        policy: SchedulingPolicy,
        on_chunk: Callable[[], None],
    ):
        """on_chunk: called with the lock held, after chunks, and when a first one is postponed."""
        super().__init__("vocoder", shared)
        self._engine, self._policy, self._on_chunk = engine, policy, on_chunk
        self._working = False  # guarded by the lock
        # See runtime.schedule.Pace.
        self._last_call_s, self._delay_s = 0.0, 0.0
        self._shortest_call_s: dict[int, float] = {}
        # Frame time at the last request's start; shorter later if the thinker shared cores.
        self._start_frame_s: float | None = None

    def on_frame(self, live: LiveRequest) -> None:
        """Wake this stage if a chunk is due. The lock is held.

        The talker's thread checks: waking this one costs more. A working stage checks again later.
        """
        starts = not live.chunks
        if self._working and not starts:
            return
        task = next((task for task in self._tasks if task.live is live), None)
        if task is None:
            return
        due = live.speech_ended or self._due_frames(task) > 0
        if starts:
            live.chunk_due = due
        if due and not self._working:
            self.changed.notify_all()

    def _select(self) -> Work | float | None:
        lives = [task.live for task in self._tasks if task.live.waiting_frames]
        delayed = self._policy.delayed_speech_s(lives, self._clock.now())
        groups: dict[tuple[bool, int], list[VocoderTask]] = {}
        for task in list(self._tasks):
            if task.live.speech_over:
                self._release(task)
                continue
            task.chunk = 0 if task.live in delayed else self._due_frames(task)
            if task.live.chunk_due and not task.chunk:
                task.live.chunk_due = False
                self._on_chunk()  # the thinker waits for this chunk
            if task.chunk:
                # One call per compiled size; the engine pads chunks to it.
                bucket = bucket_of(task.chunk, self._engine.chunk_frames, "frames")
                groups.setdefault((task.live.decoded_frames == 0, bucket), []).append(task)
        self._working = bool(groups)
        if not groups:
            return min(delayed.values(), default=None)
        # First chunks first, then the request whose audio ends first.
        urgent = min(groups, key=lambda g: min(task.live.playback.until_s for task in groups[g]))
        first, bucket = urgent
        chosen = sorted(groups[urgent], key=lambda task: task.live.playback.until_s)
        most = max(1, self._engine.frames_at_once // bucket)
        return partial(self._work, first, bucket, chosen[:most])

    def _due_frames(self, task: VocoderTask) -> int:
        live, pending = task.live, task.live.waiting_frames
        if not pending or not live.output.has_space_for_chunk:
            return 0
        wanted = live.chunk_wanted = self._wanted(task, pending)
        return min(pending, wanted) if pending >= wanted or live.speech_ended else 0

    def _wanted(self, task: VocoderTask, pending: int) -> int:
        frame_s = frame_pace(task.live.frame_times)
        if frame_s is None:
            frame_s = self._start_frame_s
        elif len(task.live.codes) <= RECENT_FRAMES:
            self._start_frame_s = frame_s
        buffered_s = task.live.playback.left_s if task.live.chunks else None
        calls = (self._last_call_s, self._shortest_call_s, self._delay_s)
        return task.schedule.next_frames(Pace(pending, buffered_s, frame_s, *calls))

    def _work(self, first: bool, bucket: int, tasks: list[VocoderTask]) -> None:
        start_s = self._clock.now()
        decoded = self._call_engine(tasks, partial(self._decode, first))
        found = [self._listen(task, samples) for task, samples in decoded]
        with self._lock:
            now = self._clock.now()
            call_s = now - start_s
            shortest_s = min(call_s, self._shortest_call_s.get(bucket, call_s))
            self._last_call_s, self._shortest_call_s[bucket] = call_s, shortest_s
            self._delay_s = call_s - shortest_s
            for (task, samples), runaway in zip(decoded, found, strict=True):
                self._put(task, samples, runaway, now)
            self._on_chunk()

    def _decode(self, first: bool, tasks: Sequence[VocoderTask]) -> list[NDArray[np.float32]]:
        decode = self._engine.start if first else self._engine.step
        return decode([task.slot for task in tasks], [_chunk(task) for task in tasks])

    def _listen(self, task: VocoderTask, samples: NDArray[np.float32]) -> Runaway | None:
        live, start = task.live, task.live.decoded_frames
        chunk = slice(start, start + task.chunk)
        ends = live.end_probabilities[chunk]
        if task.guard is None:
            first = next((number for number, end in enumerate(ends, start) if end < 1), None)
            if first is None:
                return None
            text = live.request.codec.decode(live.token_ids)
            task.guard = RunawayGuard(first, live.text.written, text, live.request.pace)
        frames = np.zeros((task.chunk, self._engine.frame_samples), np.float32)
        frames.reshape(-1)[frames.size - len(samples) :] = samples
        powers = np.square(frames).mean(1).tolist()
        unheard = slice(task.guard.frames - start, None)
        for power, codes, end in list(zip(powers, live.codes[chunk], ends, strict=True))[unheard]:
            runaway = task.guard.hear(power, int(codes[0]), end)
            if runaway is not None:
                return runaway
        return None

    def _end_runaway(self, live: LiveRequest, runaway: Runaway) -> int:
        """End runaway speech. Returns the frames to keep, including those passed on."""
        kept = max(runaway.kept, live.decoded_frames)
        logger.warning(
            "speech ran away and was ended: %s (%d text tokens, kept %d of %d frames, seed %d)",
            runaway.why,
            live.text.written,
            kept,
            len(live.codes),
            live.seed,
        )
        del live.codes[kept:], live.end_probabilities[kept:]
        live.end_speech("runaway")
        return kept

    def _put(
        self, task: VocoderTask, samples: NDArray[np.float32], runaway: Runaway | None, now: float
    ) -> None:
        """Pass a chunk, or its kept part, to the caller. The lock is held."""
        live = task.live
        if live.ended:
            return
        if not np.isfinite(samples).all():
            step = f"the chunk from frame {live.decoded_frames + 1} on"
            live.end(EngineError.not_finite("vocoder", step))
            return
        live.timestamps.progress_s = now
        frames = task.chunk
        if runaway is not None and not live.speech_ended:
            frames = self._end_runaway(live, runaway) - live.decoded_frames
            dropped = task.chunk - frames
            samples = samples[: len(samples) - dropped * self._engine.frame_samples]
        live.decoded_frames += frames
        task.schedule.decoded()
        if not frames:
            return
        live.timestamps.last_sample_s = now
        if live.timestamps.first_sample_s is None:
            live.timestamps.first_sample_s = now
        live.output.put(AudioChunk(samples, task.samples, frames))
        live.chunks, live.chunk_due = live.chunks + 1, False
        live.playback.arrived(len(samples) / SAMPLE_RATE, now)
        task.samples += len(samples)


def _chunk(task: VocoderTask) -> Tensor:
    start = task.live.decoded_frames
    codes = np.concatenate(task.live.codes[start : start + task.chunk])
    return torch.from_numpy(codes.reshape(task.chunk, -1))
