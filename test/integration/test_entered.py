import subprocess
import sys

from testing.entered import MOST


def test_requests_enter_few_files() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "testing.entered"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    counts = {}
    for line in run.stdout.splitlines():
        name, _, rest = line.partition(": ")
        if name in MOST:
            counts[name] = int(rest.split()[0])
    assert counts.keys() == MOST.keys()
    assert {name: count for name, count in counts.items() if count > MOST[name]} == {}, run.stdout
