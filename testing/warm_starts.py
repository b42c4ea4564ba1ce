"""A pytest plugin: processes of the package are forked from one that has imported what they need.

The tests start some two hundred engines, ranks and workers, and an import of torch takes two
seconds of a processor; they start as many helpers of servers, whose codecs take half a second.
`start_child` starts them as it does for users in tests with the fixture `cold_starts`, in commands
such as servers, and everywhere with TEST_ALL (see testing/repeats.py). In tests with the fixture
`warm_commands`, `python -c` and `python -m` are forked, too.
"""

import atexit
import ctypes
import fcntl
import gc
import inspect
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from qwen3_omni_neuron.engines.process import child
from qwen3_omni_neuron.helpers.pool import environment
from testing.repeats import RUNS_ALL

# The second is what ranks and their compilers import: as long as all the rest of torch.
TORCH = ("qwen3_omni_neuron.engines.process.server", "torch._dynamo.backends.common")
CODECS = ("qwen3_omni_neuron.helpers.media_work", "soundfile", "soxr", "av")
# Read before Python runs any code: a fork would have those of the process that it is forked from.
READ_AT_START = ("LD_", "MALLOC_", "OMP_", "OPENBLAS_", "MKL_", "PYTHON")
MAX_ORDER_BYTES = 1 << 17
MAX_FILES = 32
FREE_DESCRIPTOR = 900  # above those that tests open
_USUAL = subprocess.Popen
_PR_SET_CHILD_SUBREAPER = 36


class Template:
    """The process that children are forked from, started when the first one is.

    imported: modules that it imports. more: its environment variables, beside this process's.
    connection: to a template that has been started. nested: whether its children fork their own, as
    engines do ranks.

    A child is forked twice: the process between ends at once, and the kernel makes this process,
    a subreaper meanwhile, the parent. So it waits for the child as for any other.
    """

    def __init__(
        self,
        imported: Sequence[str] = (),
        more: Mapping[str, str] = MappingProxyType({}),
        connection: socket.socket | None = None,
        nested: bool = False,
    ):
        self._imported, self._environment = imported, {**os.environ, **more}
        self._lock, self._socket, self.nested = threading.Lock(), connection, nested
        self._process: subprocess.Popen[bytes] | None = None
        self._prctl = ctypes.CDLL(None).prctl
        self.variables = _read_at_start(self._environment)

    def fork(self, order: Mapping[str, Any], files: list[int]) -> int:
        """Fork a child of this process, and return its id. files: its stdin, stdout, stderr, ...

        Raises OSError where the template has ended.
        """
        with self._lock:
            connection = self._socket or self._start()
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(connection, [pickle.dumps(order)], files)
                pid, ended = connection.recv(64), connection.recv(64)
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not ended:
            raise OSError("the process that children are forked from has ended")
        return int(pid)

    def close(self) -> None:
        """End the template. Its children go on."""
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.wait()

    def _start(self) -> socket.socket:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from testing.warm_starts import fork_children; "
            f"fork_children({theirs.fileno()}, {self._imported!r})"
        )
        with theirs:
            self._process = _USUAL(
                [sys.executable, "-u", "-X", "faulthandler", "-c", code],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return self._socket


def fork_children(connection: int, imported: Sequence[str]) -> None:
    """Fork children until the other end closes; each of them runs the code of its order."""
    for name in imported:
        import_module(name)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child's own mask is in its order
    gc.collect()
    gc.freeze()  # a child need not look through what is here
    orders = socket.socket(fileno=connection)
    while True:
        data, files, *_ = socket.recv_fds(orders, MAX_ORDER_BYTES, MAX_FILES)
        if not data:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            pid = os.fork()
            if pid == 0:
                break
            orders.send(str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        orders.send(b"ended")
        for file in files:
            os.close(file)
    orders.detach()  # its number may be another file's soon
    while os.getppid() == between:
        time.sleep(0.0002)
    order = pickle.loads(data)
    _take_files(files, [0, 1, 2, *order["pass_fds"]])
    # The template's own remember whether its files can seek.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    os.sched_setaffinity(0, order["cores"])
    if order["start_new_session"]:
        os.setsid()
    if order["nested"]:
        _become_warm()
    # As Python has it at its start, whatever the template inherited: nohup ignores it.
    signal.signal(signal.SIGINT, signal.SIG_IGN if order["ignores"] else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["mask"])
    _run(*order["program"])


def _become_warm() -> None:
    """Fork a template from this process, for its own children, while it has one thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _close_files(keep=[0, 1, 2, theirs.fileno()])
        fork_children(theirs.detach(), ())
    theirs.close()
    WarmPopen.templates = [Template(connection=ours)]
    child.subprocess = SimpleNamespace(Popen=WarmPopen)  # type: ignore[assignment]


def _run(kind: str, program: str, arguments: list[str]) -> NoReturn:
    """Run a child's program, and end without freeing what was imported: that takes a second."""
    status = 0
    sys.argv = [kind, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(program, {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and status is not end.code:
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Give files the numbers that they have at the other end, and close all others."""
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, FREE_DESCRIPTOR) for file in files]
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
    _close_files(keep=numbers)


def _close_files(keep: Sequence[int]) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208, the folder's own is closed by then
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                continue


class WarmPopen(_USUAL):
    """Popen whose processes of Python are forked from the template of their variables, if any."""

    templates: Sequence[Template] = ()
    nests = True

    def _execute_child(self, *arguments: Any) -> None:
        usual = _USUAL._execute_child  # type: ignore[attr-defined]
        given = inspect.signature(usual).bind(self, *arguments).arguments
        program = None if given["shell"] or given["preexec_fn"] else _program(given["args"])
        environment = os.environ if given["env"] is None else given["env"]
        variables = _read_at_start(environment)
        template = next((one for one in self.templates if one.variables == variables), None)
        if program is None or template is None:
            usual(self, *arguments)
            return
        pipes = [
            given[name]
            for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        own = {0: pipes[0], 1: pipes[3], 2: pipes[5]}  # -1: this process's
        order = {
            "program": program,
            "env": dict(environment),
            "cwd": str(given["cwd"] or Path.cwd()),
            "cores": os.sched_getaffinity(0),
            "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "ignores": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "pass_fds": tuple(given["pass_fds"]),
            "start_new_session": given["start_new_session"],
            "nested": self.nests and template.nested,
        }
        files = [number if file == -1 else file for number, file in own.items()]
        try:
            self.pid = template.fork(order, [*files, *given["pass_fds"]])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _program(words: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """Return -c with its code or -m with its module, and the arguments; None for others."""
    if words[0] != sys.executable:
        return None
    rest = iter(words[1:])
    for word in rest:
        if word in ("-c", "-m"):
            return word, next(rest), [str(argument) for argument in rest]
        if word == "-X":
            next(rest)
        elif word != "-u":
            break
    return None


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(READ_AT_START)}


@pytest.fixture(scope="session", autouse=True)
def warm_starts() -> Iterator[None]:
    """Let `start_child` fork processes, where Linux lets a parent be chosen."""
    if RUNS_ALL or sys.platform != "linux":
        yield
        return
    WarmPopen.templates = Template(TORCH, nested=True), Template(CODECS, environment())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "subprocess", SimpleNamespace(Popen=WarmPopen))
        yield
    for template in WarmPopen.templates:
        template.close()


class WarmCommand(WarmPopen):
    """Popen of a command, whose own children start as they do for users."""

    nests = False


@pytest.fixture
def warm_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test's own processes of Python be forked from the template, too."""
    if not RUNS_ALL and sys.platform == "linux":
        monkeypatch.setattr(subprocess, "Popen", WarmCommand)


@pytest.fixture
def cold_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `start_child` start processes as it does for users."""
    monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=_USUAL))
