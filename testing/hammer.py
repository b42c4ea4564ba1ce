"""A pytest plugin that stops threads at random lines, to find our own races.

`make test-hammer` loads it. A thread stops before a line of the package, of the tests, or of the
standard library's locks and queues: between a check and a wait, a release and a notify. A generator
seeded with the seed, the test and the thread's name draws where it stops and for how long, so that
one seed stops a thread at the same of its lines, in whatever order tests run. Only the limit of a
test's stops to a share of its time depends on the clock. Processes that a test starts are not
stopped: one that SIGSTOP stops counts as dead, see engines.process.engine_process.
"""

import faulthandler
import json
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
# The longest stop of each thread in a test is drawn from one of these ranges, in seconds.
OWN_LONGEST_S = (0.25, 0.6)  # range for the test's own thread
LONGEST_S = (0.15, 0.4)  # range for stages, event loops and pools
MOST_LINES = 2000  # most lines between two stops; the number is log-uniform
# Limits of all stops of a test together: most tests take twice as long; short tests take a fraction
# of a second more, which is drawn for each.
MOST_FIRST_S, STOPS_SHARE, MOST_STOPS_S = 0.8, 0.5, 15.0
HANGS_S = 300.0  # a test that still runs after this time hangs

# Tests that rightly fail under the hammer, and why. Key: a part of a test's name.
EXEMPT: dict[str, str] = {}

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
            self.test, self.spent, self._names = test, False, dict[str, int]()
            self._first_s = MOST_FIRST_S * random.Random(f"{self._seed} {test}").random() ** 3
            self._start_s, self._stopped_s = time.monotonic(), 0.0

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Begin to trace this thread: for threading.settrace."""
        thread = _Thread(self, threading.current_thread())
        sys.settrace(thread.on_call)
        return thread.on_call(frame, event, arg)

    def generator(self, name: str) -> random.Random:
        """Return the generator of a thread of the test that runs.

        Numbers in names count what ran before in this process: threads whose names differ only in
        numbers are numbered in the order in which they reach their first line.
        """
        name = re.sub(r"\d+", "N", name)
        with self._lock:
            number = self._names[name] = self._names.get(name, 0) + 1
        return random.Random(f"{self._seed} {self.test} {name} {number}")

    def stop(self, seconds: float) -> None:
        """Stop this thread, unless the test's stops have used up their time."""
        if len(threading._active) == 1 and not children():  # type: ignore[attr-defined]
            return  # no other thread or process runs
        with self._lock:
            most_s = self._first_s + STOPS_SHARE * (time.monotonic() - self._start_s)
            self.spent = self._stopped_s + seconds > MOST_STOPS_S
            if self.spent or self._stopped_s + seconds > most_s:
                return
            self._stopped_s += seconds
        self._sleep(seconds)


class _Thread:
    """Stops of one thread, called only by that thread."""

    def __init__(self, hammer: Hammer, thread: threading.Thread):
        self._hammer, self._name = hammer, thread.name
        self._own = thread is threading.main_thread()
        self._begin()

    def _begin(self) -> None:
        self._test = self._hammer.test
        self._draw = self._hammer.generator(self._name)
        self._longest_s = self._draw.uniform(*OWN_LONGEST_S if self._own else LONGEST_S)
        self._lines = self._next()

    def _next(self) -> int:
        return int(MOST_LINES ** self._draw.random())

    def on_call(self, frame: FrameType, event: str, arg: Any) -> "Trace | None":
        # Tracing takes time, too, so it ends when no stops are left.
        if self._hammer.spent or not _is_disturbed(frame.f_code.co_filename):
            return None
        return self.on_line

    def on_line(self, frame: FrameType, event: str, arg: Any) -> Trace:
        if self._test is not self._hammer.test:
            self._begin()
        self._lines -= 1
        if self._lines <= 0:
            self._lines = self._next()
            self._hammer.stop(self._longest_s * self._draw.random())
        return self.on_line


_known: dict[str, bool] = {}


def _is_disturbed(file: str) -> bool:
    found = _known.get(file)
    if found is None:
        found = file.startswith(DISTURBED) and file != __file__
        _known[file] = found
    return found


def children() -> list[int]:
    """Return the ids of this process's child processes, where Linux names them."""
    own, found = str(os.getpid()), []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has ended
            continue
        # "PID (NAME) STATE PARENT ...", and a name may have brackets.
        if text.rpartition(")")[2].split()[1] == own:
            found.append(int(file.parent.name))
    return sorted(found)


# The plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that `python -m testing.hammered_run` passes."""
    group = parser.getgroup("hammer")
    group.addoption("--hammer-seed", type=int, default=0, help="of all that is drawn")
    group.addoption("--hammer-until", type=float, help="time.time() after which no test begins")
    group.addoption("--hammer-notes", type=Path, help="file for a line a test, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Hammer all tests of this run."""
    config.pluginmanager.register(_Plugin(config))


class _Plugin:
    """Runs the tests under a hammer until its time has passed."""

    def __init__(self, config: pytest.Config):
        self._seed = config.getoption("--hammer-seed")
        self._until_s = config.getoption("--hammer-until")
        self._notes = config.getoption("--hammer-notes")
        self._hammer = Hammer(self._seed)
        self._stderr = os.dup(2)  # still the real stderr: pytest replaces it later

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Shuffle the files, and the tests in each: short runs see other parts each time."""
        for item in items:
            for name, reason in EXEMPT.items():
                if name in item.nodeid:
                    item.add_marker(pytest.mark.skip(reason=f"hammered: {reason}"))
        draw = random.Random(self._seed)
        order = {item.path: draw.random() for item in items}
        items.sort(key=lambda item: (order[item.path], draw.random()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run a test with its threads traced, with a limit to its time."""
        self._note(item.nodeid, "running")
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
            if self._until_s is not None and time.time() > self._until_s:
                item.session.shouldstop = "the hammer's time is over"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's outcome: that of its call, or a failure before or after."""
        if report.when == "call" or report.failed or report.skipped:
            self._note(report.nodeid, report.outcome)

    def _note(self, test: str, outcome: str) -> None:
        if self._notes:
            with self._notes.open("a", encoding="utf-8") as file:
                file.write(json.dumps([test, outcome]) + "\n")
