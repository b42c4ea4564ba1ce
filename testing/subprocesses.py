"""Python in a process of its own, with the import path of this one."""

import os
import subprocess
import sys


def run_python(*arguments: object, timeout_s: float = 300) -> str:
    """Run Python on one thread, and return stdout. On failure, raises with the end of stderr."""
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
