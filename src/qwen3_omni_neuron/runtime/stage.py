"""The stages' loop: one worker thread per stage, and containment of failures.

An engine call that raises is repeated for each request separately. If the stage's own code raises,
all its requests end; if its thread or engine process ends, later requests are refused, too.
"""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from qwen3_omni_neuron.errors import EngineDiedError, Qwen3OmniError
from qwen3_omni_neuron.events import StageTime
from qwen3_omni_neuron.runtime.request import LiveRequest


class Clock:
    """Real time. A subclass may simulate time while its threads wait."""

    def now(self) -> float:
        """Return seconds."""
        return time.perf_counter()

    def condition(self, lock: threading.RLock) -> threading.Condition:
        """Return a condition over a lock."""
        return threading.Condition(lock)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Return a thread that waits by this clock."""
        return threading.Thread(target=target, name=name, daemon=True)


logger = logging.getLogger(__name__)

Work = Callable[[], None]  # without the lock


class Task:
    """One request in one stage, used only by the stage's thread.

    prefilled_s: end of its last prefill call, -inf before the first.
    """

    def __init__(self, live: LiveRequest):
        self.live = live
        self.prefilled_s = -math.inf

    @property
    def slot(self) -> int:
        """The request's row in every engine."""
        return self.live.slot


AnyTask = TypeVar("AnyTask", bound=Task)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Shared:
    """Objects shared by one pipeline's stages.

    enter_thread: called first in a stage's thread. on_release, on_fault: called with the lock held
    when a stage drops a request or fails.
    """

    clock: Clock
    lock: threading.RLock
    enter_thread: Callable[[], None]
    on_release: Callable[[LiveRequest], None]
    on_fault: Callable[["Stage[Any]"], None]


class Stage(ABC, Generic[AnyTask]):
    """Base of the stages: a thread, its tasks, and its engine calls.

    `_select` chooses the next work with the lock held. The lock guards all fields and every
    LiveRequest; `add`, `fail`, `close`, `wake` and `on_progress` are called with it. fault: error
    that stopped the stage.
    """

    def __init__(self, name: str, shared: Shared):
        self.name, self._clock, self._lock = name, shared.clock, shared.lock
        self._enter_thread, self._on_release = shared.enter_thread, shared.on_release
        self._on_fault = shared.on_fault
        self.fault: Qwen3OmniError | None = None
        self.changed = shared.clock.condition(shared.lock)
        self._tasks: list[AnyTask] = []
        self._closing = self._ended = self._woken = False
        self._delays = False  # another stage's progress may end a delay
        self._calls, self._busy_s = 0, 0.0
        self._called_s: float | None = None  # start of the call in progress
        self.thread = shared.clock.thread(self._run, f"qwen3-omni-{name}")

    @property
    def time(self) -> StageTime:
        """Engine calls, and their duration."""
        called_s = self._called_s
        call_s = 0.0 if called_s is None else self._clock.now() - called_s
        return StageTime(self._calls, self._busy_s, call_s)

    def reset_time(self) -> None:
        """Restart the counts."""
        self._calls, self._busy_s = 0, 0.0

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def add(self, task: AnyTask) -> None:
        """Add a request."""
        task.live.holders += 1
        self._tasks.append(task)
        self.changed.notify_all()

    def fail(self, error: Qwen3OmniError) -> None:
        """Set the fault, and end the requests. Only the first call before `close` counts."""
        if self.fault is None and not self._closing:
            logger.error("the %s stage has failed: %s", self.name, error)
            self.fault = error
            for task in self._tasks:
                task.live.end(error)
            self._on_fault(self)

    def close(self) -> None:
        """End the thread after its current work."""
        self._closing = True
        self.changed.notify_all()

    def wake(self) -> None:
        """Let the thread select again.

        The thread itself may call this: the garbage collector may end a request in any line.
        """
        self._woken = True
        self.changed.notify_all()

    def on_progress(self) -> None:
        """Select again if this stage waits for another's progress."""
        if self._delays:
            self.changed.notify_all()

    def join(self, timeout_s: float | None) -> None:
        """Wait until the thread has ended, without the lock."""
        with self._lock:
            while not self._ended:
                if not self.changed.wait(timeout_s):
                    return
        self.thread.join(timeout_s)

    @abstractmethod
    def _select(self) -> Work | float | None:
        """Return the next work, seconds until another selection, or None: wait for a wake-up."""

    def _run(self) -> None:
        try:
            self._enter_thread()
            while self._run_once():
                pass
        except BaseException as error:  # such as SystemExit of a library
            logger.critical("the %s stage's thread has ended", self.name, exc_info=True)
            kind = type(error).__name__
            with self._lock:
                self.fail(
                    EngineDiedError(
                        f"The {self.name} stage's thread was ended by {kind}: {error}. Load the "
                        "model again."
                    )
                )
                for task in list(self._tasks):
                    self._release(task)
        finally:
            with self._lock:
                self._ended = True
                self.changed.notify_all()

    def _run_once(self) -> bool:
        try:
            work = self._wait_for_work()
            if work is None:
                return False
            work()
        except Exception as error:  # not the engine's: see _call_engine
            logger.exception("the %s stage failed", self.name)
            with self._lock:
                for task in self._tasks:
                    task.live.end(error)
        return True

    def _wait_for_work(self) -> Work | None:
        """Return the next work, or None if closed. Ends late requests."""
        with self._lock:
            while True:
                self._woken = False
                now = self._clock.now()
                for task in list(self._tasks):
                    if now >= task.live.deadline_s(now):
                        task.live.end(task.live.late())
                    if task.live.ended or self._closing:
                        self._release(task)
                if self._closing:
                    return None
                work = self._select()
                if callable(work):
                    return work
                if self._woken:
                    continue
                # Another stage may hang in a call: check its requests' deadlines, too.
                waits = [task.live.request.options.wait_timeout_s for task in self._tasks]
                if work is not None:
                    waits.append(work)
                self.changed.wait(min(waits, default=None))

    def _release(self, task: AnyTask) -> None:
        self._tasks.remove(task)
        task.live.holders -= 1
        self._on_release(task.live)

    def _call_engine(
        self, tasks: Sequence[AnyTask], call: Callable[[Sequence[AnyTask]], Sequence[Result]]
    ) -> list[tuple[AnyTask, Result]]:
        """Call the engine for several tasks. Returns the successful ones with results."""
        now = self._called_s = self._clock.now()
        for task in tasks:
            task.live.called_s[self.name] = now
        try:
            return list(zip(tasks, call(tasks), strict=True))
        except Exception as error:
            if len(tasks) == 1:
                with self._lock:
                    tasks[0].live.end(error)
                return []
        finally:
            self._called_s = None
            call_s = self._clock.now() - now
            self._calls, self._busy_s = self._calls + 1, self._busy_s + call_s
            for task in tasks:
                task.live.called_s[self.name] = None
                if task.live.timestamps.first_token_s is not None:
                    task.live.speech_s[self.name] += call_s
        return [pair for task in tasks for pair in self._call_engine((task,), call)]
