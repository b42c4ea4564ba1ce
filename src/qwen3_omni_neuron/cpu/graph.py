"""Graphs for the CPU: a model's function traced once, so that a step costs no Python."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Graph(nn.Module):
    """A function of a module as a module's forward: what the tracer and the freezer take."""

    def __init__(self, owner: nn.Module, function: Callable[..., Any]):
        super().__init__()
        self.owner = owner
        self._function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(*inputs)


def trace_graph(
    owner: nn.Module, function: Callable[..., Any], *example: Tensor
) -> Callable[..., Any]:
    """Trace `function`, a method of `owner` or a partial of it, on an example of its inputs.

    An axis that `function` reads as a Python number is static, as it is in a compiled graph, and
    what the tracer warns of (a branch on a shape) is meant. An axis that it never reads so, such
    as the KV window or a chunk of the vocoder's, may be of any length in later calls. Weights are
    held by reference, not copied.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", category=torch.jit.TracerWarning)
        # PyTorch points from TorchScript to torch.export, whose CPU path needs a C++ compiler and
        # over a minute for the graphs that this traces in a second.
        warnings.simplefilter("ignore", category=DeprecationWarning)
        graph = torch.jit.trace(_Graph(owner, function).eval(), example, check_trace=False)
        frozen = torch.jit.freeze(graph)

    def run(*inputs: Tensor) -> Any:
        # Its optimizer takes a second on the first calls and gains nothing here.
        with torch.jit.optimized_execution(False):
            return frozen(*inputs)

    return run
