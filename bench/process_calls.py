"""Cost of a call of an engine in a process of its own, beside torch.multiprocessing's pipe.

    python -m bench.process_calls

The engine computes nothing, so what is timed is the transfer: of a talker's step (one token id in,
float32 logits [1, 3072] out), of 600 KB out and of 8 MB in. torch.multiprocessing's pipe passes
descriptors of the tensors' memory. A row is one request by one way: deciles of its seconds.
"""

import argparse
import multiprocessing.connection
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.multiprocessing
from torch import Tensor

from bench.common.command_line import Figures, parser_of, run
from bench.common.measure import timed
from qwen3_omni_neuron.engines.process.engine_process import EngineProcess

ROUNDS, CALLS = 5, {"step": 400, "600 KB out": 100, "8 MB in": 40}
LOGITS, KILOBYTES_600, MEGABYTES_8 = 3072, 150_000, 2_000_000


class IdleEngine:
    """Engine that answers at once."""

    slots = 1
    context_length = 1

    def __init__(self) -> None:
        self._logits = torch.zeros(1, LOGITS)
        self._samples = torch.zeros(KILOBYTES_600)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Return a talker's logits."""
        return self._logits

    def decode(self) -> Tensor:
        """Return 600 KB."""
        return self._samples

    def take(self, features: Tensor) -> int:
        """Take any number of bytes."""
        return len(features)

    def close(self) -> None:
        """Do nothing: there is no memory to free."""


def serve_pipe(pipe: multiprocessing.connection.Connection) -> None:
    """Serve an engine over torch.multiprocessing's pipe until None comes."""
    engine = IdleEngine()
    while (request := pipe.recv()) is not None:
        method, arguments = request
        pipe.send(getattr(engine, method)(*arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    return run("process_calls", parser_of("process_calls", __doc__), measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Make the same requests in every way, in turn."""
    spawn = torch.multiprocessing.get_context("spawn")
    pipe, far_pipe = spawn.Pipe()
    spawn.Process(target=serve_pipe, args=(far_pipe,), daemon=True).start()
    # Taken from the module by name: the engine's process doesn't know this script's __main__.
    from bench.process_calls import IdleEngine as Factory

    process = EngineProcess("idle", cast(Any, Factory))  # it serves any object's methods
    process.wait_ready(60)

    def through_pipe(method: str, *arguments: object) -> Any:
        pipe.send((method, arguments))
        return pipe.recv()

    requests: dict[str, tuple[Any, ...]] = {
        "step": ("step", [0], [5]),
        "600 KB out": ("decode",),
        "8 MB in": ("take", torch.zeros(MEGABYTES_8)),
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, request in requests.items():
            for way, call in (("ours", process.call), ("torch", through_pipe)):
                seconds.setdefault(f"{name}, {way}", []).extend(
                    seconds_of(call, request, CALLS[name])
                )
    process.close()
    pipe.send(None)
    found = {way: deciles_us(values) for way, values in seconds.items()}
    summary = {way: deciles["p50_us"] for way, deciles in found.items()}
    return [{"way": way, **deciles} for way, deciles in found.items()], summary


def seconds_of(call: Callable[..., Any], request: tuple[Any, ...], count: int) -> list[float]:
    """Return the seconds of each call, after a few that warm up."""
    seconds = []
    for _ in range(count + count // 10):
        # A new tensor each time, like a prompt's: torch.multiprocessing moves a tensor to shared
        # memory when it is first sent, and leaves it there.
        arguments = [part.clone() if isinstance(part, Tensor) else part for part in request]
        seconds.append(timed(partial(call, *arguments)))
    return seconds[count // 10 :]


def deciles_us(seconds: list[float]) -> dict[str, float]:
    """Return the first, fifth and ninth decile in microseconds."""
    tenths = [round(1e6 * value, 1) for value in statistics.quantiles(seconds, n=10)]
    return {"p10_us": tenths[0], "p50_us": tenths[4], "p90_us": tenths[8]}


if __name__ == "__main__":
    sys.exit(main())
