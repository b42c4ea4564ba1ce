"""`qwen3-omni-neuron serve` as a process of its own, for benchmarks and tests."""

import argparse
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from testing.command_line import InputError

SLOTS, QUEUED = 8, 64
READY_S, END_S = 600.0, 60.0


@contextmanager
def server_process(
    checkpoint: Any,
    options: argparse.Namespace,
    flags: Sequence[str] = (),
    on_line: Callable[[str], object] = lambda line: None,
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Serve the checkpoint in a process of its own. Yields URL and process.

    flags: flags of `serve`, beside those that are set here. on_line: called in a thread of its own
    with each line of its log after it is ready.
    """
    words = ["-m", "qwen3_omni_neuron", "serve", "--model", str(checkpoint), "--port", "0"]
    words += ["--max-concurrency", str(SLOTS), "--max-queued", str(QUEUED), "--model-name", "load"]
    words += ["--dtype", options.dtype, "--placement", options.placement]
    words += [] if options.threads is None else ["--threads", str(options.threads)]
    words += flags
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        timer = threading.Timer(READY_S, process.kill)
        timer.start()
        url = ""
        for line in process.stderr:
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "ready":
                url = event["url"]
                break
        timer.cancel()
        if not url:
            raise InputError("the server did not start.")
        rest = (on_line(line) for line in process.stderr)
        threading.Thread(target=deque, args=(rest, 0), daemon=True).start()
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
