"""Parts with their weights shared by several processes: see part_ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2])
def test_parts_over_nxds_collectives_are_the_plain_modules(
    nxdi: None, checkpoint: Path, tmp_path: Path, ranks: int
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = [str(HERE / "part_ranks.py"), str(checkpoint), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *launcher, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(said) == [f"rank {r} of {ranks}: alike" for r in range(ranks)]
