"""The entry of the CPU in the table of targets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.compilation.manifest import GraphRecord
from qwen3_omni_neuron.compilation.plan import CHUNK_FRAMES, CompilePlan, Limits
from qwen3_omni_neuron.compilation.target import CoreRequest, EngineSpec, Target
from qwen3_omni_neuron.compilation.versions import decisive_versions
from qwen3_omni_neuron.errors import OptionError

if TYPE_CHECKING:
    from qwen3_omni_neuron.engines.protocols import StageEngines

LIMITS = Limits(
    target="cpu",
    degrees=(1,),
    profiles={"safe": (1,)},
    dtypes=("float32", "bfloat16", "float64"),
    predictor_top_k=0,
    sizes={"prompt_buckets": (), "patch_buckets": (), "chunk_frames": CHUNK_FRAMES},
)


def compile_graph(plan: CompilePlan, graph: str, folder: Path) -> GraphRecord:
    """Write a graph's weights; see cpu.weights.compile_graph."""
    from qwen3_omni_neuron.cpu.weights import compile_graph

    return compile_graph(plan, graph, folder)


def expected_bytes(plan: CompilePlan, graph: str) -> int:
    """Return the size in bytes of a graph's weights; see cpu.weights.expected_bytes."""
    from qwen3_omni_neuron.cpu.weights import expected_bytes

    return expected_bytes(plan, graph)


def build_engines(spec: EngineSpec, stages: Sequence[str]) -> "StageEngines":
    """Build the engines of some stages; see cpu.build.build_engines."""
    from qwen3_omni_neuron.cpu.build import build_engines

    return build_engines(spec, stages)


def no_cores(plan: CompilePlan, request: CoreRequest) -> Mapping[str, Mapping[str, str]]:
    """Return empty environments: the operating system gives cores to processes.

    Raises OptionError where an instance or cores were named.
    """
    for name, value in (("instance", request.instance), ("cores", request.cores)):
        if value is not None:
            raise OptionError(
                f"{name} is for target neuron, and this is for target {plan.target}. Leave it out."
            )
    return {stage: {} for stage in request.stages}


# A graph holds weights in the layout of this package's modules: no other version shapes them.
CPU = Target(LIMITS, decisive_versions, compile_graph, expected_bytes, build_engines, no_cores)
