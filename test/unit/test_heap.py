"""Memory at the ends of malloc's arenas goes back to the system."""

import subprocess
import sys

import pytest

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
