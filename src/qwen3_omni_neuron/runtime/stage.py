"""A stage: one worker thread that steps all requests it has as one batch."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from qwen3_omni_neuron.runtime.clock import Clock
from qwen3_omni_neuron.runtime.request import LiveRequest

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class Task:
    """One request in one stage. Its fields belong to the stage's thread."""

    def __init__(self, live: LiveRequest):
        self.live = live

    @property
    def slot(self) -> int:
        return self.live.slot


AnyTask = TypeVar("AnyTask", bound=Task)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Shared:
    """What the stages of one pipeline share.

    lock: guards what more than one thread touches. enter_thread: what a stage's thread does first.
    on_release: called with the lock held, when a stage has let go of a request.
    """

    clock: Clock
    lock: threading.RLock
    enter_thread: Callable[[], None]
    on_release: Callable[[LiveRequest], None]


class Stage(ABC, Generic[AnyTask]):
    """What the stages have in common: the loop, and what becomes of failures.

    The loop chooses what to do with the lock held, and does it with the lock free. The lock guards
    `_tasks`, `_closing`, `_ended`, and every LiveRequest.
    """

    def __init__(self, name: str, shared: Shared):
        self._name, self._clock, self._lock = name, shared.clock, shared.lock
        self._enter_thread, self._on_release = shared.enter_thread, shared.on_release
        self.changed = shared.clock.condition(shared.lock)
        self._tasks: list[AnyTask] = []
        self._closing = self._ended = False
        self._thread = shared.clock.thread(self._run, f"qwen3-omni-{name}")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, task: AnyTask) -> None:
        """Admit a request. The lock is held."""
        task.live.holders += 1
        self._tasks.append(task)
        self.changed.notify_all()

    def close(self) -> None:
        """Let the thread end after what it is doing now. The lock is held."""
        self._closing = True
        self.changed.notify_all()

    def join(self, timeout_s: float | None) -> None:
        """Wait for the thread, unless it is the one that asks. The lock is free."""
        if threading.current_thread() is self._thread:
            return
        with self._lock:
            while not self._ended:
                if not self.changed.wait(timeout_s):
                    return
        self._thread.join(timeout_s)

    @abstractmethod
    def _select(self) -> Work | None:
        """What to do next, or None where everything waits for another stage. The lock is held."""

    def _run(self) -> None:
        try:
            self._enter_thread()
            while self._turn():
                pass
        finally:
            with self._lock:
                self._ended = True
                self.changed.notify_all()

    def _turn(self) -> bool:
        """Wait for work and do it. False: the stage is closed."""
        try:
            work = self._next()
            if work is None:
                return False
            work()
        except Exception as error:  # ours: engines' failures are caught where they are called
            logger.exception("the %s stage failed", self._name)
            with self._lock:
                for task in self._tasks:
                    task.live.end(error)
        return True

    def _next(self) -> Work | None:
        """Waits for work. None: the stage is closed."""
        with self._lock:
            while True:
                now = self._clock.now()
                for task in list(self._tasks):
                    if now >= task.live.deadline_s(now):
                        task.live.end(task.live.late())
                    if task.live.ended or self._closing:
                        self._release(task)
                if self._closing:
                    return None
                work = self._select()
                if work is not None:
                    return work
                # Without a request there is nothing to be late for. With one, another stage may
                # never come out of a call for it.
                waits = (task.live.request.wait_timeout_s for task in self._tasks)
                self.changed.wait(min(waits, default=None))

    def _release(self, task: AnyTask) -> None:
        """This stage has done all it will for a request. The lock is held."""
        self._tasks.remove(task)
        task.live.holders -= 1
        self._on_release(task.live)

    def _call(
        self, tasks: Sequence[AnyTask], call: Callable[[Sequence[AnyTask]], Sequence[Result]]
    ) -> list[tuple[AnyTask, Result]]:
        """Call an engine for some tasks at once. Returns the results of those that have one.

        Where it raises, each is called for alone: the one that is at fault ends with the error,
        and the others go on.
        """
        now = self._clock.now()
        for task in tasks:
            task.live.called_s[self._name] = now
        try:
            return list(zip(tasks, call(tasks), strict=True))
        except Exception as error:
            if len(tasks) == 1:
                with self._lock:
                    tasks[0].live.end(error)
                return []
        finally:
            for task in tasks:
                task.live.called_s[self._name] = None
        return [pair for task in tasks for pair in self._call((task,), call)]
