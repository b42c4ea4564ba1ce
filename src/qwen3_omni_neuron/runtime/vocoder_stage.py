"""The vocoder's stage: codec frames in, audio chunks out."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.protocols import Vocoder
from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk
from qwen3_omni_neuron.runtime.request import RECENT_FRAMES, LiveRequest, frame_pace
from qwen3_omni_neuron.runtime.schedule import Pace, Schedule
from qwen3_omni_neuron.runtime.stage import Shared, Stage, Task, Work


class VocoderTask(Task):
    """samples: how many are behind it. chunk: frames that it takes next. The lock guards both, and
    the schedule: the talker's thread asks `VocoderStage.on_frame`."""

    def __init__(self, live: LiveRequest, schedule: Schedule):
        super().__init__(live)
        self.schedule = schedule
        self.samples = self.chunk = 0


class VocoderStage(Stage[VocoderTask]):
    """Decodes the chunks that are due, those of one size as one batch."""

    def __init__(self, engine: Vocoder, shared: Shared, on_room: Callable[[], None]):
        """on_room: wakes the talker, whose frames were taken; called with the lock held."""
        super().__init__("vocoder", shared)
        self._engine, self._on_room = engine, on_room
        self._working = False  # guarded by the lock
        self._call_s = 0.0  # what the last call took
        self._own_s: dict[int, float] = {}  # the least that a call took, by its chunk size
        self._wait_s = 0.0  # by how much the last one was above that
        # The pace of a request's first frames, of the last one that had them: later ones come
        # faster, where the thinker has the same cores and is done.
        self._start_frame_s: float | None = None

    def on_frame(self, live: LiveRequest) -> None:
        """A request has a frame more, or none will come: go to work if that makes a chunk due.
        The lock is held. Asked here, since waking a thread costs more than asking; and not at all
        while it works, since it looks for itself when it is done."""
        if self._working:
            return
        task = next((task for task in self._tasks if task.live is live), None)
        if task is not None and (live.speech_ended or self._due_frames(task)):
            self.changed.notify_all()

    def _select(self) -> Work | None:
        groups: dict[tuple[bool, int], list[VocoderTask]] = {}
        for task in list(self._tasks):
            if task.live.speech_ended and not task.live.waiting_frames:
                self._release(task)
                continue
            task.chunk = self._due_frames(task)
            if task.chunk:
                bucket = next(b for b in self._engine.chunk_frames if b >= task.chunk)
                groups.setdefault((task.samples == 0, bucket), []).append(task)
        self._working = bool(groups)
        return partial(self._work, groups) if groups else None

    def _due_frames(self, task: VocoderTask) -> int:
        """Frames of the task's next chunk, 0 where it is not due yet."""
        live, pending = task.live, task.live.waiting_frames
        if not pending or not live.output.has_room_for_chunk:
            return 0
        wanted = self._wanted(task, pending)
        return min(pending, wanted) if pending >= wanted or live.speech_ended else 0

    def _wanted(self, task: VocoderTask, pending: int) -> int:
        """Frames that the schedule wants in the task's next chunk, a compiled chunk size."""
        frame_s = frame_pace(task.live.frame_times)
        if frame_s is None:
            frame_s = self._start_frame_s
        elif len(task.live.codes) <= RECENT_FRAMES:
            self._start_frame_s = frame_s
        first_s = task.live.marks.first_sample_s
        buffered_s = None
        if first_s is not None:
            buffered_s = task.samples / SAMPLE_RATE - (self._clock.now() - first_s)
        calls = (self._call_s, self._own_s, self._wait_s)
        return task.schedule.next_frames(Pace(pending, buffered_s, frame_s, *calls))

    def _work(self, groups: dict[tuple[bool, int], list[VocoderTask]]) -> None:
        for (first, bucket), tasks in groups.items():
            start_s = self._clock.now()
            decoded = self._call(tasks, partial(self._decode, first))
            with self._lock:
                now = self._clock.now()
                self._call_s = now - start_s
                self._own_s[bucket] = min(self._call_s, self._own_s.get(bucket, self._call_s))
                self._wait_s = self._call_s - self._own_s[bucket]
                for task, samples in decoded:
                    self._put(task, samples, now)
                self._on_room()

    def _decode(self, first: bool, tasks: Sequence[VocoderTask]) -> list[NDArray[np.float32]]:
        decode = self._engine.start if first else self._engine.step
        return decode([task.slot for task in tasks], [_chunk(task) for task in tasks])

    def _put(self, task: VocoderTask, samples: NDArray[np.float32], now: float) -> None:
        """Hand a chunk to the caller. The lock is held."""
        live = task.live
        if live.ended:
            return
        live.marks.progress_s = live.marks.last_sample_s = now
        if live.marks.first_sample_s is None:
            live.marks.first_sample_s = now
        live.output.put(AudioChunk(samples, task.samples, task.chunk))
        live.decoded_frames += task.chunk
        task.samples += len(samples)
        task.schedule.decoded()


def _chunk(task: VocoderTask) -> Tensor:
    """The frames of a task's next chunk, int64 [frames, 16]."""
    start = task.live.decoded_frames
    return torch.stack(task.live.codes[start : start + task.chunk])
