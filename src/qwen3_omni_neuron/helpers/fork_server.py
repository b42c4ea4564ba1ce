"""Small single-threaded process that loads its children's modules, and forks the children.

It forks a child on request, kills one whose report the pool no longer awaits, and reports how each
ended. Only it reaps them, so that it never kills another process with a reused id. When the pool
disconnects, it ends its children, then itself.
"""

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from qwen3_omni_neuron.engines.process.child import MOST_OUTPUT_BYTES, take_signals, trim_output
from qwen3_omni_neuron.errors import InputError
from qwen3_omni_neuron.helpers import wire

Run = Callable[[wire.Channel, int], object]
"""A child's function (connection, descriptor of the result's file)."""
FORK_REQUEST = struct.Struct("<QQ")
"""Fork request: bytes and CPU seconds of the child.

It carries three descriptors: the child's end of its connection, its result, and the report.
"""
REPORT = struct.Struct("<i")
"""Report: a child's return code as subprocess has it, or NO_FORK."""
READY = b"R"
NO_FORK = 1 << 16
OUT_OF_MEMORY = 12  # exit status of a child
MORE_CPU_S = 60  # CPU seconds by which a child may raise its limit
_FILES = 3
_MOST_FILES = 64  # limit of a child's open files
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def serve(
    control: int, setup: int, parent: int, niceness: int, prepare: Callable[[int], Run]
) -> None:
    """Serve until the pool disconnects.

    control: descriptor of the connection. setup: descriptor of a file for `prepare`. parent: the
    pool's process id. niceness: the children's. prepare: loads modules, and returns their function.
    """
    take_signals()
    # A service manager sends SIGTERM to every process while the server still finishes requests.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run = prepare(setup)
    os.close(setup)
    gc.freeze()  # a collection in a child would copy every page with objects
    _ForkServer(socket.socket(fileno=control), parent, run, niceness).serve()


class _ForkServer:
    def __init__(self, control: socket.socket, parent: int, run: Run, niceness: int):
        self._control, self._parent = control, parent
        self._run, self._niceness = run, niceness
        self._pid = os.getpid()
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._reports: dict[int, socket.socket] = {}  # by process id
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def serve(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._control.send(READY)
            while os.getppid() == self._parent:  # forked processes may hold the pool's end, too
                ready = {descriptor for descriptor, _ in self._poll.poll(1000)}
                if self._wake.fileno() in ready:
                    self._wake.recv(4096)
                for pid, report in self._reports.items():
                    if report.fileno() in ready:
                        self._poll.unregister(report)
                        _kill(pid)
                self._reap()
                if self._control.fileno() in ready and not self._fork():
                    break
        self._end()

    def _fork(self) -> bool:
        order, files, _, _ = socket.recv_fds(self._control, FORK_REQUEST.size, _FILES)
        if not order:
            return False
        limits, (*own, last) = FORK_REQUEST.unpack(order), files
        report = socket.socket(fileno=last)
        try:
            pid = os.fork()
            if not pid:
                report.close()
                self._be_child(*limits, *own)
            self._reports[pid] = report
            self._poll.register(report, 0)  # the pool's disconnection is always reported
        except OSError:
            _send(report, NO_FORK)
        finally:
            for descriptor in own:
                os.close(descriptor)
        return True

    def _be_child(self, memory_bytes: int, cpu_s: int, connection: int, result: int) -> NoReturn:
        status = 1
        try:
            os.setsid()  # killed with its own children
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            if self._libc is not None:
                self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                self._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            if os.getppid() != self._pid:  # the fork server ended before prctl
                os._exit(1)
            for own in (self._control, self._wake, self._woken, *self._reports.values()):
                own.close()
            os.nice(self._niceness)
            limit(memory_bytes, cpu_s)
            channel = wire.Channel(socket.socket(fileno=connection))
            try:
                self._run(channel, result)
            except InputError as error:
                channel.send(wire.ERROR, text=f"{type(error).__name__}\n{error}")
            status = 0
        except MemoryError:
            status = OUT_OF_MEMORY
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        while self._reports and (pid := _ended()):
            _kill(pid)  # its own children
            _, status = os.waitpid(pid, 0)
            trim_output()
            report = self._reports.pop(pid)
            with contextlib.suppress(KeyError):
                self._poll.unregister(report)
            _send(report, os.waitstatus_to_exitcode(status))

    def _end(self) -> None:
        """End and reap the children: in a container nobody else may reap them."""
        for pid in self._reports:
            _kill(pid)
        for pid in self._reports:
            os.waitpid(pid, 0)


def _send(report: socket.socket, code: int) -> None:
    with report, contextlib.suppress(OSError):  # the pool no longer waits for it
        report.send(REPORT.pack(code))


def _ended() -> int:
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return 0 if found is None else found.si_pid


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no group of its own yet
        os.killpg(pid, signal.SIGKILL)


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Limit this process, where the system supports it.

    Unless it is root's, it can then start no process or thread: RLIMIT_NPROC does not limit root.
    """
    limits = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + MORE_CPU_S),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (MOST_OUTPUT_BYTES, MOST_OUTPUT_BYTES),
        resource.RLIMIT_NOFILE: (_MOST_FILES, _MOST_FILES),
        resource.RLIMIT_NPROC: (0, 0),
    }
    with contextlib.suppress(OSError):  # no /proc
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + memory_bytes
        limits[resource.RLIMIT_AS] = (most, most)
    for kind, both in limits.items():
        with contextlib.suppress(OSError, ValueError):  # a lower limit may exist
            resource.setrlimit(kind, both)
    with contextlib.suppress(OSError):
        # When memory runs out, the kernel kills this process before the server.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
