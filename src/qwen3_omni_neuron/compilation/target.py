"""What a target has to give so that the runner can compile for it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qwen3_omni_neuron.compilation.manifest import GraphRecord
from qwen3_omni_neuron.compilation.plan import CompilePlan

GraphCompiler = Callable[[CompilePlan, str, Path], GraphRecord]


@dataclass(frozen=True)
class Target:
    """compile_graph: compiles one graph of the plan into a folder that exists and is empty, and
    records it; it runs in a process of its own, so it is a function of a module. expected_bytes:
    about what a graph's folder will hold, for the progress and for a full disk. keeps_failed: what
    a compile that failed has left is worth a look: a compiler's logs.
    """

    compile_graph: GraphCompiler
    expected_bytes: Callable[[CompilePlan, str], int]
    keeps_failed: bool = False
