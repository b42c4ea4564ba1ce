"""Decoders and parts with their weights shared by several processes: see ranks and part_ranks."""

from pathlib import Path

import pytest

from testing.int8_experts import write_int8_experts
from testing.subprocesses import run_python

SCRIPTS = Path(__file__).parents[2] / "testing" / "neuron"


@pytest.mark.parametrize("ranks", [2, 4])
def test_engines_over_several_ranks_are_the_cpu_engines(nxdi, checkpoint, ranks) -> None:
    """Four ranks for two KV heads: each head is held twice."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    printed = run_python(*launcher, SCRIPTS / "ranks.py", checkpoint)
    said = [line for line in printed.splitlines() if line.startswith("rank ")]
    assert sorted(said) == [f"rank {r} of {ranks}: within 0.0001" for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2])
def test_engines_with_experts_in_int8_over_several_ranks_are_those_of_the_weights(
    nxdi, checkpoint, tmp_path, ranks
) -> None:
    experts, widened = write_int8_experts(checkpoint, tmp_path)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    printed = run_python(*launcher, SCRIPTS / "ranks.py", experts, widened)
    said = [line for line in printed.splitlines() if line.startswith("rank ")]
    assert sorted(said) == [f"rank {r} of {ranks}: within 0.0001" for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2])
def test_parts_over_nxds_collectives_are_the_plain_modules(
    nxdi, checkpoint, tmp_path, ranks
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = [SCRIPTS / "part_ranks.py", checkpoint, tmp_path]
    printed = run_python(*launcher, *arguments)
    said = [line for line in printed.splitlines() if line.startswith("rank ")]
    assert sorted(said) == [f"rank {r} of {ranks}: alike" for r in range(ranks)]
