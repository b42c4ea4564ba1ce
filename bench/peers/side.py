"""One side of a comparison: a process that loads a model, measures it and prints the figures.

The driver (bench.vs_openvino) writes a Job as JSON to the process's standard input and reads the
last line of its output. Both sides run this file, each in its own environment, so it imports
neither torch nor the package.

Every measurement has a prompt of its own, since OpenVINO keeps the KV rows of prompts it has seen.
All kinds of replies are measured once a round; the first round warms up and is not counted.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

from testing.memory import peak_mb, resident_mb

PROBE_SAMPLES = 1009  # one in this many samples is compared with the other side's


@dataclass(frozen=True)
class Job:
    """A model and what to measure.

    model: folder of the model; compiled: of its compiled tree, "" for OpenVINO's side.
    dtype: "float32", "auto" (the side's default), "int8" or "int4". threads: cores that the process
    may use. short, long: prompts, each used once; see `count_prompts`.
    """

    model: str
    compiled: str
    dtype: str
    threads: int
    text_tokens: int
    frames: int
    repeats: int
    short: list[str]
    long: list[str]


@dataclass(frozen=True)
class Reply:
    """A reply and its times, in seconds since the request.

    audio: samples, a 1-D array, empty for a written reply. first_sample_s: None where the audio did
    not come in chunks.
    """

    prompt_tokens: int
    token_ids: list[int]
    audio: Any
    first_text_s: float
    first_sample_s: float | None
    total_s: float


class Model(Protocol):
    """A loaded model, one request at a time, greedy, without repetition penalty."""

    def write(self, prompt: str, tokens: int) -> Reply:
        """Answer with this number of tokens, without speech."""

    def speak(self, prompt: str, tokens: int, frames: int, one_frame_chunks: bool) -> Reply:
        """Answer with these numbers of tokens and frames.

        Audio comes in chunks of one frame, or else in the way that ends earliest.
        """


def count_prompts(repeats: int) -> tuple[int, int]:
    """Return how many short and long prompts a job needs."""
    return 3 * (1 + repeats), 1 + repeats


def serve(package: str, load: Callable[[Job], Model]) -> None:
    """Read a job, measure it, and print figures and replies as one line of JSON.

    package: distribution whose version is noted. load: imports it, so that this is timed, too.
    """
    job = Job(**json.load(sys.stdin))
    print(json.dumps(measure(job, package, load)))


def measure(job: Job, package: str, load: Callable[[Job], Model]) -> dict[str, Any]:
    """Load the model and measure it.

    Returns "version" of the package, "figures", numbers or lists of one number a round, and what
    the driver compares: "prompt_tokens", "token_ids" and "probes" (see PROBE_SAMPLES) of the
    spoken replies.
    """
    # Set before anything is imported, because libraries count the cores then.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    start_s = time.perf_counter()
    model = load(job)
    load_s = time.perf_counter() - start_s
    loaded_mb = resident_mb()
    short, long = iter(job.short), iter(job.long)
    rounds = [_round(model, job, short, long) for _ in range(1 + job.repeats)]
    whole = [replies[0] for replies in rounds]
    counted = rounds[1:]
    return {
        "version": metadata.version(package),
        "figures": {
            "load_s": load_s,
            "first_reply_s": whole[0].total_s,
            "reply_s": [reply.total_s for reply, *_ in counted],
            "first_text_s": [reply.first_text_s for reply, *_ in counted],
            "first_sample_s": [chunked.first_sample_s for _, chunked, *_ in counted],
            "token_s": [
                (written.total_s - written.first_text_s) / (job.text_tokens - 1)
                for *_, written, _ in counted
            ],
            "prefill_s": [one_token.first_text_s for *_, one_token in counted],
            "loaded_mb": loaded_mb,
            "peak_mb": peak_mb(),
        },
        "prompt_tokens": [[reply.prompt_tokens for reply in replies] for replies in rounds],
        "token_ids": [reply.token_ids for reply in whole],
        "samples": [len(reply.audio) for reply in whole],
        "probes": [reply.audio[::PROBE_SAMPLES].tolist() for reply in whole],
    }


def _round(model: Model, job: Job, short: Iterator[str], long: Iterator[str]) -> list[Reply]:
    """Return a whole reply, one in chunks of one frame, a written one, and a long prompt's."""
    return [
        model.speak(next(short), job.text_tokens, job.frames, one_frame_chunks=False),
        model.speak(next(short), job.text_tokens, job.frames, one_frame_chunks=True),
        model.write(next(short), job.text_tokens),
        model.write(next(long), 1),
    ]
