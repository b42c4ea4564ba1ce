"""What a call of an engine in a process of its own costs, beside torch.multiprocessing's way.

    python -m bench.process_calls

The engine does nothing, so what is timed is the way there and back: of a talker's step (one token
id in, float32 logits [1, 3072] out), of 600 KB out and of 8 MB in. torch.multiprocessing's pipe
hands over descriptors of the tensors' memory. `socket` is the floor: 100 bytes there and back.
"""

import json
import multiprocessing.connection
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from qwen3_omni_neuron.process.engine_process import EngineProcess

ROUNDS, CALLS = 5, {"step": 400, "600 KB out": 100, "8 MB in": 40}
LOGITS, KILOBYTES_600, MEGABYTES_8 = 3072, 150_000, 2_000_000


class IdleEngine:
    """Answers at once."""

    slots = 1
    context_length = 1

    def __init__(self) -> None:
        self._logits = torch.zeros(1, LOGITS)
        self._sound = torch.zeros(KILOBYTES_600)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        return self._logits

    def sound(self) -> Tensor:
        return self._sound

    def take(self, features: Tensor) -> int:
        return len(features)

    def close(self) -> None:
        return


def serve_pipe(pipe: multiprocessing.connection.Connection) -> None:
    engine = IdleEngine()
    while (request := pipe.recv()) is not None:
        method, arguments = request
        pipe.send(getattr(engine, method)(*arguments))


def serve_socket(end: socket.socket) -> None:
    while data := end.recv(4096):
        end.sendall(data)


def main() -> None:
    spawn = torch.multiprocessing.get_context("spawn")
    pipe, far_pipe = spawn.Pipe()
    end, far_end = socket.socketpair()
    piped = spawn.Process(target=serve_pipe, args=(far_pipe,), daemon=True)
    echo = spawn.Process(target=serve_socket, args=(far_end,), daemon=True)
    piped.start()
    echo.start()
    # Under the module's name: the engine's process doesn't know this script as its __main__.
    from bench.process_calls import IdleEngine as Factory

    process = EngineProcess("idle", Factory)
    process.wait_ready(60)

    def through_pipe(method: str, *arguments: object) -> Any:
        pipe.send((method, arguments))
        return pipe.recv()

    def through_socket() -> None:
        end.sendall(b"x" * 100)
        end.recv(4096)

    requests: dict[str, tuple[Any, ...]] = {
        "step": ("step", [0], [5]),
        "600 KB out": ("sound",),
        "8 MB in": ("take", torch.zeros(MEGABYTES_8)),
    }
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, request in requests.items():
            for way, call in (("ours", process.call), ("torch", through_pipe)):
                seconds = timed(call, request, CALLS[name])
                times.setdefault(f"{name}, {way}", []).extend(seconds)
        times.setdefault("socket", []).extend(timed(through_socket, (), CALLS["step"]))
    process.close()
    pipe.send(None)
    end.close()
    print(json.dumps({way: figures(values) for way, values in times.items()}, indent=2))


def timed(call: Callable[..., Any], request: tuple[Any, ...], count: int) -> list[float]:
    """Seconds of each call, after a few that warm up."""
    seconds = []
    for _ in range(count + count // 10):
        # A new tensor each time, as a prompt's is: torch.multiprocessing moves a tensor to shared
        # memory when it is first sent, and leaves it there.
        arguments = [part.clone() if isinstance(part, Tensor) else part for part in request]
        begin = time.perf_counter()
        call(*arguments)
        seconds.append(time.perf_counter() - begin)
    return seconds[count // 10 :]


def figures(seconds: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(seconds, n=10)
    return {
        name: round(1e6 * value, 1)
        for name, value in (("p10_us", tenths[0]), ("p50_us", tenths[4]), ("p90_us", tenths[8]))
    }


if __name__ == "__main__":
    main()
