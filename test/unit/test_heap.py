"""Memory that malloc keeps goes back to the system."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from qwen3_omni_neuron.engines.process.heap import allocated_bytes, pages_read

SCRIPT = """
import os, threading
import torch
from qwen3_omni_neuron.engines.process.heap import give_back, resident_mb, trim_early

other = os.fork()
if other:
    os.waitpid(other, 0)
    trim_early()
torch.empty(20 << 20, dtype=torch.uint8).zero_()  # glibc's own limit is 40 MB after it is freed
done = threading.Barrier(9)

def work():
    pieces = [b"x" * (1 << 20) for _ in range(30)]
    del pieces
    done.wait()
    done.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
before = resident_mb()
for thread in threads:
    thread.start()
done.wait()
give_back()
print(resident_mb() - before, flush=True)
done.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc is not glibc's")
def test_the_ends_of_arenas_go_back_early() -> None:
    """A process trims early; one that was forked from it before leaves malloc as it is."""
    command = [sys.executable, "-c", SCRIPT]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    as_it_is, early = map(int, said.split())
    assert early < 50
    assert as_it_is > 100


HELD = """
import itertools
from qwen3_omni_neuron.engines.process.heap import LOOK_S, IdleMemory, resident_mb, trim_early

trim_early()
seconds = itertools.count(step=LOOK_S)
memory = IdleMemory(now=lambda: next(seconds))
pieces = [bytes([1]) * 50_000 for _ in range(2000)]
last = pieces[-1]  # below it malloc keeps what is freed
memory.look()
before = resident_mb()
pieces.clear()
memory.look()
print(before - resident_mb())
"""


@pytest.mark.skipif(allocated_bytes() is None, reason="malloc is not glibc's of 2.33")
def test_what_was_in_use_during_the_last_check_goes_back_once_it_is_freed() -> None:
    """Resident memory has not grown since then."""
    command = [sys.executable, "-c", HELD]
    gone_mb = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert gone_mb > 80


SERVED = """
import gc, sys
from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.serving.model import load_and_answer

omni = load_and_answer(SPEAKING_CHECKPOINT)
print(gc.get_freeze_count(), len(gc.get_objects()))
print(omni._grammars._pool._server is not None and "llguidance" not in sys.modules)
omni.close()
"""


def test_a_served_model_is_not_looked_through_for_garbage_and_its_vocabulary_is_read() -> None:
    """The first grammar of a client holds nobody up."""
    command = [sys.executable, "-c", SERVED]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    numbers, made = done.stdout.splitlines()
    kept, looked_through = map(int, numbers.split())
    assert made == str(find_spec("llguidance") is not None)
    assert kept > 50_000
    assert looked_through < kept / 20


READ = """
import mmap, os, resource, sys
with open(sys.argv[1], "rb") as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE))
print(resource.getrusage(resource.RUSAGE_SELF).ru_majflt, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_pages_that_another_process_has_read_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as written:
        written.write(bytes(16 << 20))
        os.fsync(written.fileno())
    command = [sys.executable, "-c", READ, str(file)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as other:
        assert other.stdin is not None and other.stdout is not None
        theirs = int(other.stdout.readline())
        if theirs == 0:
            pytest.skip("the temporary folder is in memory: no page is read from a disk")
        assert pages_read([other.pid]) >= pages_read() + theirs
        other.stdin.close()
    assert pages_read([other.pid]) <= pages_read(), "it has ended"
