"""A pytest plugin that stops threads at random lines, to find our own races: `make test-hammer`.

A thread stops before a line of the package, of the tests, or of the standard library's locks and
queues: between a check and a wait, a release and a notify. A generator seeded with --hammer-seed,
the test and the thread's name draws where it stops and for how long, so that one seed stops a
thread at the same of its lines, in whatever order tests run. Processes that a test starts are not
stopped.
"""

import faulthandler
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import qwen3_omni_neuron

ROOT = Path(__file__).parents[1]
# Files whose lines are stopped at: the code under test, the tests, and what threads wait in.
DISTURBED = (
    qwen3_omni_neuron.__path__[0] + os.sep,
    *(str(ROOT / folder) + os.sep for folder in ("test", "testing", "bench")),
    threading.__file__,
    str(Path(threading.__file__).parent / "queue.py"),
    str(Path(threading.__file__).parent / "concurrent") + os.sep,
)
LONGEST_S = (0.15, 0.6)  # the longest stop of a thread in a test is drawn from this range
MOST_LINES = 2000  # most lines between two stops; the number is log-uniform
FIRST_S, STOPS_SHARE, MOST_STOPS_S = 0.4, 0.5, 15.0  # limits of all stops of a test together
HANGS_S = 300.0  # a test that still runs after this time hangs

Trace = Callable[[FrameType, str, Any], Any]


class Hammer:
    """Stops of all threads during each test.

    sleep: what stops a thread, called with seconds. `_lock` guards what threads share: `_names`,
    and the seconds that the test's stops took.
    """

    def __init__(self, seed: int, sleep: Callable[[float], None] = time.sleep):
        self._seed, self._sleep, self._lock = seed, sleep, threading.Lock()
        self.begin("")

    def begin(self, test: str) -> None:
        """Draw anew for a test with this name."""
        with self._lock:
            self._test, self.spent, self._names = test, False, dict[str, int]()
            self._start_s, self._stopped_s = time.monotonic(), 0.0

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Begin to trace this thread: for threading.settrace."""
        # Numbers in names count what ran before in this process: threads whose names differ only
        # in numbers are numbered in the order in which they reach their first line.
        name = re.sub(r"\d+", "N", threading.current_thread().name)
        with self._lock:
            number = self._names[name] = self._names.get(name, 0) + 1
        draw = random.Random(f"{self._seed} {self._test} {name} {number}")
        longest_s, left = draw.uniform(*LONGEST_S), int(MOST_LINES ** draw.random())

        def on_line(frame: FrameType, event: str, arg: Any) -> Trace:
            nonlocal left
            left -= 1
            if left <= 0:
                left = int(MOST_LINES ** draw.random())
                self.stop(longest_s * draw.random())
            return on_line

        def on_call(frame: FrameType, event: str, arg: Any) -> Trace | None:
            # Tracing takes time, too, so it ends when no stops are left.
            file = frame.f_code.co_filename
            disturbed = file.startswith(DISTURBED) and file != __file__
            return on_line if disturbed and not self.spent else None

        sys.settrace(on_call)
        return on_call(frame, event, arg)

    def stop(self, seconds: float) -> None:
        """Stop this thread, unless the test's stops have used up their time."""
        with self._lock:
            most_s = FIRST_S + STOPS_SHARE * (time.monotonic() - self._start_s)
            self.spent = self._stopped_s + seconds > MOST_STOPS_S
            if self.spent or self._stopped_s + seconds > most_s:
                return
            self._stopped_s += seconds
        self._sleep(seconds)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("hammer")
    group.addoption("--hammer-seed", type=int, help="of all that is drawn; default: drawn, too")
    group.addoption("--hammer-minutes", type=float, default=10.0, help="no test begins after them")


def pytest_configure(config: pytest.Config) -> None:
    """Hammer all tests of this run."""
    config.pluginmanager.register(_Plugin(config))


class _Plugin:
    """Runs the tests under a hammer until its time has passed."""

    def __init__(self, config: pytest.Config):
        seed = config.getoption("--hammer-seed")
        self._seed = random.randrange(10**6) if seed is None else seed
        self._end_s = time.monotonic() + 60 * config.getoption("--hammer-minutes")
        self._hammer = Hammer(self._seed)
        self._stderr = os.dup(2)  # still the real stderr: pytest replaces it later

    def pytest_report_header(self) -> str:
        """Say how to stop the threads in the same way again."""
        return f"hammered: SEED={self._seed}"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Shuffle the files, and the tests in each: short runs see other parts each time."""
        draw = random.Random(self._seed)
        order = {item.path: draw.random() for item in items}
        items.sort(key=lambda item: (order[item.path], draw.random()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run a test with its threads traced, with a limit to its time."""
        faulthandler.dump_traceback_later(HANGS_S, exit=True, file=self._stderr)
        self._hammer.begin(item.nodeid)
        threading.settrace(self._hammer.trace)
        sys.settrace(self._hammer.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            faulthandler.cancel_dump_traceback_later()
            if time.monotonic() > self._end_s:
                item.session.shouldstop = "the hammer's time is over"
