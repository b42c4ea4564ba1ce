"""Thinker and talker with their weights shared by several processes: see ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATHS = (HERE, HERE.parent, HERE.parent.parent / "bench")


@pytest.mark.parametrize("ranks", [2, 4])
def test_engines_over_several_ranks_are_the_cpu_engines(
    nxdi: None, checkpoint: Path, ranks: int
) -> None:
    """Four ranks for two KV heads: each head is held twice."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, str(HERE / "ranks.py"), str(checkpoint)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(said) == [f"rank {r} of {ranks}: within 0.0001" for r in range(ranks)]
