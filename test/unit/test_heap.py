"""Memory that malloc keeps goes back to the system."""

import sys
from importlib.util import find_spec

import pytest

from testing.subprocesses import run_python

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
    as_it_is, early = map(int, run_python("-c", SCRIPT).split())
    assert early < 50
    assert as_it_is > 100


SERVED = """
import gc, sys
from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.serving.model import load_and_answer

omni = load_and_answer(SPEAKING_CHECKPOINT)
print(gc.get_freeze_count(), len(gc.get_objects()))
print(omni._grammars._pool._pool.pid is not None and "llguidance" not in sys.modules)
omni.close()
"""


def test_a_served_model_is_not_looked_through_for_garbage_and_its_vocabulary_is_read() -> None:
    """The first grammar of a client holds nobody up."""
    numbers, made = run_python("-c", SERVED).splitlines()
    kept, looked_through = map(int, numbers.split())
    assert made == str(find_spec("llguidance") is not None)
    assert kept > 50_000
    assert looked_through < kept / 20
