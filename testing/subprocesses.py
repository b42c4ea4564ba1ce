"""Python in a process of its own, which finds what this one finds."""

import os
import subprocess
import sys


def run_python(*arguments: object, timeout_s: float = 300) -> str:
    """What it prints, one thread an operation. Fails with its last words where it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
