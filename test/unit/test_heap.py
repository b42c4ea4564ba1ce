"""Memory that malloc keeps goes back to the system."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from qwen3_omni_neuron.engines.process.heap import allocated_bytes

SCRIPT = """
import sys, threading
import torch
from qwen3_omni_neuron.engines.process.heap import give_back, resident_mb, trim_early

if sys.argv[1] == "early":
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
print(resident_mb() - before)
done.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc is not glibc's")
def test_the_ends_of_arenas_go_back_early() -> None:
    def left_mb(how: str) -> int:
        command = [sys.executable, "-c", SCRIPT, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert left_mb("early") < 50
    assert left_mb("as it is") > 100


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
import gc
from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.serving.model import load_and_answer

omni = load_and_answer(SPEAKING_CHECKPOINT)
print(gc.get_freeze_count(), len(gc.get_objects()))
print(omni._grammars._made is not None)
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
