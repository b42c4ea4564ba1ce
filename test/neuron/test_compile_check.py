"""The script of deploy/compile-check over a stand-in for the compiler, with a small model."""

import subprocess
import sys
from pathlib import Path

from testing.imports import ROOT
from testing.torchneuron.leaner import write_leaner_checkpoint

# In a process of its own: it sets variables and makes a group of ranks.
DRIVER = """
import runpy, sys
from pathlib import Path
from qwen3_omni_neuron.checkpoint.config_json import read_config
from testing.torchneuron import backend
from testing.torchneuron.runtime import StandIn

def refuse(module):
    if len(backend.FURTHER) > 1:
        raise ValueError("too\\nlarge")
    backend.FURTHER.append(print)

backend.FURTHER.append(refuse)
main = runpy.run_path("deploy/compile-check/check.py")["main"]
main.__globals__["PARTS"] = ("text_projection", "hidden_projection", "audio_encoder")
sys.exit(main(read_config(Path(sys.argv[1])), StandIn(), Path(sys.argv[2])))
"""


def test_each_graph_has_a_row_and_a_failure_ends_with_1(tmp_path: Path) -> None:
    checkpoint, caches = write_leaner_checkpoint(tmp_path / "checkpoint"), tmp_path / "caches"
    caches.mkdir()
    command = [sys.executable, "-c", DRIVER, str(checkpoint), str(caches)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("| text_projection[rows=512]", "8", "1"),
        ("| audio_encoder[windows=1]", "8", "0"),
    ]
    assert rows[0][4] == "compiled |"
    assert "too large" in rows[1][4]
