"""The targets that a tree can be compiled for, by name: the place where another one is put in."""

from pathlib import Path

from qwen3_omni_neuron.compilation.manifest import GraphRecord
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.compilation.target import Target


def _compile_for_cpu(plan: CompilePlan, graph: str, folder: Path) -> GraphRecord:
    from qwen3_omni_neuron.cpu.weights import compile_graph  # torch, which only the worker needs

    return compile_graph(plan, graph, folder)


def _cpu_bytes(plan: CompilePlan, graph: str) -> int:
    from qwen3_omni_neuron.cpu.weights import expected_bytes

    return expected_bytes(plan, graph)


def _compile_for_neuron(plan: CompilePlan, graph: str, folder: Path) -> GraphRecord:
    from qwen3_omni_neuron.neuron.compile import compile_graph

    return compile_graph(plan, graph, folder)


def _neuron_bytes(plan: CompilePlan, graph: str) -> int:
    from qwen3_omni_neuron.neuron.compile import expected_bytes

    return expected_bytes(plan, graph)


COMPILERS = {
    "cpu": Target(_compile_for_cpu, _cpu_bytes),
    "neuron": Target(_compile_for_neuron, _neuron_bytes, keeps_failed=True),
}
