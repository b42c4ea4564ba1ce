"""Parts through NxD's own ModelBuilder and NxDModel, whose compiler and runtime are stand-ins.

What does not run here: the tracer to HLO, neuronx-cc, a NEFF, a device, more than one rank.
"""

from pathlib import Path

from testing.part_cases import PLAIN_PARTS
from testing.subprocesses import run_python

SCRIPTS = Path(__file__).parents[2] / "testing" / "neuron"


def test_parts_through_model_builder_are_the_plain_modules(nxdi, checkpoint, tmp_path) -> None:
    """See builder_run. Every graph of a part has inputs of its own."""
    printed = run_python(SCRIPTS / "builder_run.py", checkpoint, tmp_path)
    calls = {"code_predictor": 1, "code2wav": 9}
    lines = [
        f"{name}: {calls.get(name, 2)} calls alike, up to 1 graphs of equal inputs"
        for name in PLAIN_PARTS
    ]
    assert printed.splitlines() == [
        *lines,
        "codes of float32 in mixed",
        "refused",
        "refused",
        "two ranks: as far as the sum",
    ]
