"""Parts with their weights shared by several processes: see part_ranks."""

from pathlib import Path

import pytest

from testing.subprocesses import run_python

SCRIPTS = Path(__file__).parents[2] / "testing" / "neuron"


@pytest.mark.parametrize("ranks", [2])
def test_parts_over_nxds_collectives_are_the_plain_modules(
    nxdi: None, checkpoint: Path, tmp_path: Path, ranks: int
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = [SCRIPTS / "part_ranks.py", checkpoint, tmp_path]
    printed = run_python(*launcher, *arguments)
    said = [line for line in printed.splitlines() if line.startswith("rank ")]
    assert sorted(said) == [f"rank {r} of {ranks}: alike" for r in range(ranks)]
