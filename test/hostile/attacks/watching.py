"""Watchers beside an attack, each in a process of its own: /health, a good client, and nothing.

    python -m test.hostile.attacks.watching health URL KEY

Each prints a line a sample: when it was due, how many seconds it took, and what was wrong. They end
with their stdin. `/health` is asked every 20 ms whether or not the answer before has come: a stall
of a second is one sample of a second, one of 0.98, and so on. The idle one sleeps 5 ms, again and
again: what it takes longer is what the machine stalls a process that has nothing to do.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from test.hostile.attacks.good_client import ANSWER, good_question
from testing.http_client import HttpClient

HEALTH_S, SLEEP_S, PAUSE_S = 0.02, 0.005, 0.05
TIMEOUT_S = 60.0
Sample = tuple[float, float, str]
"""Due time (time.monotonic, which all processes share), seconds taken, what was wrong."""


def health(client: HttpClient) -> Iterator[Sample]:
    """Ask for /health at a steady pace."""
    due_s = time.monotonic()
    while True:
        try:
            status = client.ask("/health").status
            wrong = "" if status == 200 else f"status {status}"
        except (OSError, HTTPException) as error:
            client.close()
            wrong = type(error).__name__
        yield due_s, time.monotonic() - due_s, wrong
        due_s += HEALTH_S
        time.sleep(max(0.0, due_s - time.monotonic()))


def good(client: HttpClient) -> Iterator[Sample]:
    """Ask for spoken answers, one after the other, and time the gaps between their parts."""
    while True:
        last_s, said, sound = time.monotonic(), "", 0
        try:
            answer = client.begin("/v1/chat/completions", good_question(True))
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                now_s = time.monotonic()
                yield last_s, now_s - last_s, ""
                last_s, event = now_s, json.loads(line[6:])
                audio = event["choices"][0]["delta"].get("audio") or {}
                said, sound = said + audio.get("transcript", ""), sound + len(audio.get("data", ""))
            right = answer.status == 200 and said == ANSWER and sound > 50_000
            wrong = "" if right else f"status {answer.status}, {said!r}, {sound} of sound"
        except (OSError, HTTPException, ValueError, LookupError) as error:
            client.close()
            wrong = type(error).__name__
        yield last_s, time.monotonic() - last_s, wrong
        time.sleep(PAUSE_S)


def chats(client: HttpClient) -> Iterator[Sample]:
    """Ask small questions for short answers in text, one after the other."""
    question = {**good_question(False), "modalities": ["text"], "audio": None, "max_tokens": 8}
    while True:
        start_s = time.monotonic()
        try:
            status = client.ask("/v1/chat/completions", question).status
            wrong = "" if status == 200 else f"status {status}"
        except (OSError, HTTPException) as error:
            client.close()
            wrong = type(error).__name__
        yield start_s, time.monotonic() - start_s, wrong
        time.sleep(HEALTH_S)


def idle(_: HttpClient) -> Iterator[Sample]:
    """Sleep, and measure how much longer that takes."""
    while True:
        start_s = time.monotonic()
        time.sleep(SLEEP_S)
        yield start_s, time.monotonic() - start_s - SLEEP_S, ""


WATCHERS = {"health": health, "good": good, "chats": chats, "idle": idle}


def main(arguments: Sequence[str]) -> None:
    """Watch until stdin ends."""
    name, url, key = arguments
    client, ending = HttpClient(url, key, timeout_s=TIMEOUT_S), threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ending.set()

    threading.Thread(target=wait, daemon=True).start()
    for at_s, seconds, wrong in WATCHERS[name](client):
        sys.stdout.write(f"{at_s:.4f} {seconds:.4f} {wrong}\n")
        if ending.is_set():  # after the sample that was in progress
            break
    sys.stdout.flush()
    os._exit(0)  # without closing connections


@dataclass(frozen=True)
class Seen:
    """Samples of a time span: the times of the right ones, and each fault once."""

    samples: int
    p99_s: float
    worst_s: float
    wrong: tuple[str, ...]


def seen(samples: Sequence[Sample], start_s: float, end_s: float) -> Seen:
    """Summarize the samples that were due in a time span."""
    chosen = [one for one in samples if start_s <= one[0] <= end_s]
    seconds = sorted(seconds for _, seconds, wrong in chosen if not wrong)
    wrong = tuple(dict.fromkeys(wrong for _, _, wrong in chosen if wrong))
    if not seconds:
        return Seen(0, 0.0, 0.0, wrong)
    return Seen(len(seconds), seconds[int(len(seconds) * 0.99)], seconds[-1], wrong)


class Watcher:
    """A watcher's process. samples: all so far, complete when the block has ended."""

    def __init__(self, name: str, url: str, key: str | None):
        self.samples: list[Sample] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "test.hostile.attacks.watching", name, url, key or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._thread.join(2 * TIMEOUT_S)
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at_s, seconds, wrong = line.rstrip("\n").split(" ", 2)
            self.samples.append((float(at_s), float(seconds), wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
