"""The pipeline: slots, their queue of requests, and the stages."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from qwen3_omni_neuron.engines.process.fork import OwnLock, check_not_forked
from qwen3_omni_neuron.engines.protocols import Engines, Fault, Vocoder
from qwen3_omni_neuron.engines.sampling import SampleIds, sample_ids
from qwen3_omni_neuron.errors import BusyError, ClosedError, EngineDiedError
from qwen3_omni_neuron.events import SAMPLE_RATE, Status
from qwen3_omni_neuron.model.config import GenerationDefaults, OmniConfig
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.runtime.buffers import Output, TokenBuffer
from qwen3_omni_neuron.runtime.policy import SchedulingPolicy, turns
from qwen3_omni_neuron.runtime.request import LiveRequest, Request
from qwen3_omni_neuron.runtime.schedule import AdaptiveSchedule, FixedSchedule, Schedule
from qwen3_omni_neuron.runtime.stage import Clock, Shared, Stage, Task
from qwen3_omni_neuron.runtime.talker_stage import TalkerStage, TalkerTask
from qwen3_omni_neuron.runtime.thinker_stage import (
    EncoderStage,
    ThinkerStage,
    ThinkerTask,
    takes_long,
)
from qwen3_omni_neuron.runtime.vocoder_stage import VocoderStage, VocoderTask

logger = logging.getLogger(__name__)

LOOK_S = 0.25  # poll interval for processes that have ended
AWAITED_S = 20.0  # the next window of speech takes 8 s, and waits for a pause
GREEDY = GenerationDefaults()
StageTasks = list[tuple[Stage[Any], Task]]


class Pipeline:
    """Runs up to `slots` concurrent requests, each in the same slot of every engine.

    One lock guards all shared fields, here, in stages and requests. No engine is called under it.
    """

    def __init__(
        self,
        engines: Engines,
        config: OmniConfig,
        max_queued: int,
        clock: Clock | None = None,
        prefix_cache: bool = True,
        sample_ids: SampleIds = sample_ids,
        defaults: GenerationDefaults = GREEDY,
    ):
        """Start the stages.

        max_queued: requests that may wait for slots. defaults: the checkpoint's text sampling.
        """
        self.clock, self.code_groups = clock or Clock(), config.code_groups
        self.latency_samples = engines.vocoder.latency_samples if engines.vocoder else 0
        self._engines, self._config, self._defaults = engines, config, defaults
        self._max_queued = max_queued
        # The garbage collector may run SpeechStream.__del__ while the lock is held.
        self._lock = OwnLock()
        self._free_slots = list(range(engines.thinker.slots))  # least recently used first
        # By slot: until when other requests get it last.
        self._awaited_until_s = [-math.inf] * engines.thinker.slots
        self._queue: deque[tuple[LiveRequest, StageTasks]] = deque()
        self._running: set[LiveRequest] = set()
        self._ended_s: dict[str | None, float] = {}  # end of each waiting owner's last request
        # By request: the one that gets its slot next.
        self._successors: WeakKeyDictionary[LiveRequest, tuple[LiveRequest, StageTasks]] = (
            WeakKeyDictionary()
        )
        self._closed = False
        parts = [part for part in (engines.thinker, engines.talker) if part is not None]
        self.caches_prefixes = prefix_cache and all(part.chunked_prefill for part in parts)
        shared = Shared(
            self.clock, self._lock, engines.enter_thread, self._on_release, self._on_fault
        )
        vocoder = engines.vocoder
        frame_audio_s = vocoder.frame_samples / SAMPLE_RATE if vocoder else 0.0
        self._policy = policy = SchedulingPolicy(engines.shares_cores, frame_audio_s, self._running)
        self._thinker = ThinkerStage(engines.thinker, sample_ids, shared, policy)
        self._stages: list[Stage[Any]] = [self._thinker]
        if engines.talker is not None and engines.vocoder is not None:
            assert config.talker is not None
            self._vocoder = VocoderStage(engines.vocoder, shared, policy, self._on_chunk)
            self._talker = TalkerStage(
                engines.talker, config.talker, sample_ids, shared, policy, self._on_frame
            )
            self._stages += [self._talker, self._vocoder]
        self._encoder = None
        if engines.encoder is not None:
            self._encoder = EncoderStage(
                engines.encoder, self._thinker.cache, shared, self._thinker.wake
            )
            self._stages.append(self._encoder)
        for stage in self._stages:
            stage.start()
        found = [(s, getattr(getattr(engines, s.name), "fault", None)) for s in self._stages]
        faults = [(stage, fault) for stage, fault in found if fault is not None]
        self._ending = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_engines, args=(faults,), name="qwen3-omni-watch", daemon=True
        )
        if faults:
            self._watch.start()

    def submit(self, request: Request, after: LiveRequest | None = None) -> tuple[LiveRequest, int]:
        """Start a request, or queue it.

        after: a request whose slot this one gets. Returns the request and its queue position, 0 if
        it has a slot. Raises OptionError for uncompiled chunk sizes, BusyError, ClosedError, and
        EngineDiedError.
        """
        live, tasks = self._make_tasks(request)
        with self._lock:
            self._check_stages(tasks)
            if after is not None:
                self._follow(after, live, tasks)
                return live, 0
            before = self._queued
            yielding = any(live.request.ahead and not live.ended for live in self._running)
            self._queue.append((live, tasks))
            self._admit()
            if live.timestamps.admitted_s is not None:
                return live, 0
            if not yielding and before >= self._max_queued:
                self._queue.remove((live, tasks))
                raise BusyError(
                    f"all {len(self._running)} slots are in use, and {before} requests wait for "
                    "one. Finish or close a stream first, or load with a larger max_concurrency "
                    "or max_queued."
                )
            logger.debug("a request is queued behind %d others", before)
            return live, before + 1

    def warm_up(self, request: Request) -> None:
        """Run the first request to its end, uncounted by `status`."""
        live, _ = self.submit(request)
        with live.output.changed:
            while live.holders:
                live.output.changed.wait()
            for stage in self._stages:
                stage.reset_time()
        if live.error is not None:
            raise live.error

    def prefill_ahead(self, request: Request) -> LiveRequest:
        """Compute a prompt's rows for a later request that begins with them.

        It waits for a slot that no request needs, and for pauses (see runtime.policy). It ends by
        `cancel`, or when a request needs the slot. For AWAITED_S, other requests get this slot
        last. Raises ClosedError and EngineDiedError.
        """
        never_s = threading.TIMEOUT_MAX
        options = replace(request.options, first_token_timeout_s=never_s, wait_timeout_s=never_s)
        live, tasks = self._make_tasks(replace(request, options=options, ahead=True))
        with self._lock:
            self._check_stages(tasks)
            self._queue.append((live, tasks))
            self._admit()
        return live

    def cancel(self, live: LiveRequest, timeout_s: float = 0.0) -> None:
        """End a request without an error; each stage drops it at its next step.

        timeout_s: longest wait for that; the slot then has the rows of its last call.
        """
        deadline_s = self.clock.now() + timeout_s
        with live.output.changed:
            live.end()
            while live.holders and self.clock.now() < deadline_s:
                live.output.changed.wait(deadline_s - self.clock.now())

    def call_without_waiting(self, close: Callable[[], None]) -> None:
        """Call a finalizer that acquires the lock, in another thread if it is held.

        A finalizer may run in any line of a thread, which may hold a lock, such as a logging
        handler's, that this lock's holder waits for.
        """
        check_not_forked()
        if self._lock.acquire(blocking=False):
            try:
                close()
            finally:
                self._lock.release()
        else:
            with suppress(RuntimeError):  # at exit no thread starts
                threading.Thread(target=close, daemon=True).start()

    def status(self) -> Status:
        """Return the numbers of requests, engines' work, and a stage's fault."""
        check_not_forked()
        # Without the lock, which stages hold at every step: servers call this for each request.
        stages = {stage.name: stage.time for stage in self._stages}
        fault = next((str(stage.fault) for stage in self._stages if stage.fault is not None), None)
        return Status(len(self._running), self._queued, stages, fault)

    def close(self, join_timeout_s: float | None = None) -> None:
        """End all requests with a ClosedError, then the threads and the engines.

        join_timeout_s: longest wait for each thread, which may be in an engine call.
        """
        with self._lock:
            self._closed = True
            error = ClosedError("the model was closed while the request ran.")
            for live in [*self._running, *(live for live, _ in self._queue)]:
                live.end(error)
            for stage in self._stages:
                stage.close()
        if threading.current_thread() in (self._watch, *(s.thread for s in self._stages)):
            # The garbage collector may close a model in an engine call, for which `close` waits.
            threading.Thread(target=self._end_engines, args=(join_timeout_s,)).start()
        else:
            self._end_engines(join_timeout_s)

    def _end_engines(self, join_timeout_s: float | None) -> None:
        self._ending.set()  # the engines' processes end now
        if self._watch.is_alive() and self._watch is not threading.current_thread():
            self._watch.join()
        self._engines.close()
        for stage in self._stages:
            stage.join(join_timeout_s)

    @property
    def _queued(self) -> int:
        # The copy is atomic in the interpreter.
        waiting = [live for live, _ in list(self._queue)]
        return sum(not live.ended and not live.request.ahead for live in waiting)

    def _watch_engines(self, faults: Sequence[tuple[Stage[Any], Fault]]) -> None:
        while not self._ending.wait(LOOK_S):
            for stage, fault in faults:
                try:
                    error = fault()
                except Exception:
                    logger.exception("checking an engine's processes has failed")
                    continue
                if error is not None:
                    with self._lock:
                        stage.fail(error)

    def _check_stages(self, tasks: StageTasks) -> None:
        if self._closed:
            raise ClosedError("this model was closed; load it again.")
        for stage, _ in tasks:
            if stage.fault is not None:  # a new object, because it is raised
                raise EngineDiedError(str(stage.fault))

    def _make_tasks(self, request: Request) -> tuple[LiveRequest, StageTasks]:
        reader = self._talker if request.speak else self._thinker
        text = TokenBuffer(
            reader.changed, self._thinker.wake, self._config.tts_eos_id, self._config.tts_pad_id
        )
        chunk_space = self._vocoder.wake if request.speak else self._wake
        output = Output(self.clock.condition(self._lock), self._thinker.wake, chunk_space)
        live = LiveRequest(request, text, output, self._wake, self.clock.now)
        context_length = self._engines.thinker.context_length
        tasks: StageTasks = []
        if request.written is None:
            thinker = ThinkerTask(live, self._config, self._defaults, context_length)
            tasks.append((self._thinker, thinker))
            if self._encoder is not None and takes_long(request):
                live.encoding = True
                tasks.append((self._encoder, Task(live)))
        if not request.speak:
            text.abandon()
        else:
            assert self._engines.talker is not None and self._engines.vocoder is not None
            context_length = self._engines.talker.context_length
            talker = TalkerTask(live, self._config, self._talker.allowed, context_length)
            tasks.append((self._talker, talker))
            if not request.ahead:
                schedule = _schedule(request.options, self._engines.vocoder)
                tasks.append((self._vocoder, VocoderTask(live, schedule)))
        return live, tasks

    def _admit(self) -> None:
        """Assign free slots to requests in turn, then to one prefill ahead at a time.

        The lock is held, as in all methods below.
        """
        self._queue = deque(entry for entry in self._queue if not entry[0].ended)
        while self._free_slots and (live := self._next()) is not None:
            entry = next(entry for entry in self._queue if entry[0] is live)
            self._queue.remove(entry)
            self._start(*entry)
        if any(not live.request.ahead for live, _ in self._queue):
            for live in self._running:
                if live.request.ahead:
                    live.end()

    def _next(self) -> LiveRequest | None:
        waiting = [live for live, _ in self._queue if not live.request.ahead]
        owners = {live.owner for live in waiting}
        self._ended_s = {owner: at_s for owner, at_s in self._ended_s.items() if owner in owners}
        if waiting:
            return min(waiting, key=turns(waiting, self._running, self._ended_s))
        if any(live.request.ahead for live in self._running):
            return None
        return self._queue[0][0] if self._queue else None

    def _follow(self, after: LiveRequest, live: LiveRequest, tasks: StageTasks) -> None:
        if after in self._running or not after.ended:
            self._successors[after] = live, tasks
        else:
            self._queue.appendleft((live, tasks))
            self._admit()

    def _start(self, live: LiveRequest, tasks: StageTasks) -> None:
        request, now = live.request, self.clock.now()
        slot = self._free_slots[-1]
        if request.keys is not None:
            keys, cache = request.keys.thinker, self._thinker.cache
            free = sorted(self._free_slots, key=lambda slot: self._awaited_until_s[slot] > now)
            slot, live.cached_rows = cache.choose(free, keys)
            live.prefilled_rows["thinker"] = live.cached_rows
        self._free_slots.remove(slot)
        self._awaited_until_s[slot] = now + AWAITED_S if request.ahead else -math.inf
        self._start_in(slot, live, tasks)

    def _start_in(self, slot: int, live: LiveRequest, tasks: StageTasks) -> None:
        live.slot, live.timestamps.admitted_s = slot, self.clock.now()
        self._running.add(live)
        if live.request.written is not None:
            no_media = torch.empty(0, self._config.thinker.text.hidden_size)
            live.put_written(no_media, live.timestamps.admitted_s)
        for stage, task in tasks:
            stage.add(task)

    def _on_release(self, live: LiveRequest) -> None:
        if live.holders == 0:
            live.end()
            self._running.discard(live)
            self._ended_s[live.owner] = now = self.clock.now()
            self._policy.ended(live, now)
            live.output.changed.notify_all()
            successor, tasks = self._successors.pop(live, (None, []))
            if successor is not None and live.error is not None:
                successor.end(live.error)
            if successor is not None and not successor.ended:
                self._start_in(live.slot, successor, tasks)
            else:
                self._free_slots.append(live.slot)
                self._admit()

    def _on_fault(self, stage: Stage[Any]) -> None:
        for live, tasks in (*self._queue, *self._successors.values()):
            if any(needed is stage for needed, _ in tasks):
                live.end(stage.fault)

    def _on_frame(self, live: LiveRequest) -> None:
        self._vocoder.on_frame(live)
        self._thinker.on_progress()

    def _on_chunk(self) -> None:
        self._thinker.on_progress()
        self._talker.on_progress()

    def _wake(self) -> None:
        with self._lock:
            for stage in self._stages:
                stage.wake()


def _schedule(options: RequestOptions, vocoder: Vocoder) -> Schedule:
    if options.chunk_frames is not None:
        return FixedSchedule(options.chunk_frames, vocoder.chunk_frames)
    return AdaptiveSchedule(
        vocoder.chunk_frames,
        vocoder.frame_samples / SAMPLE_RATE,
        vocoder.latency_samples / SAMPLE_RATE,
        early=options.first_chunk == "early",
    )
