"""The rows of graphs as a manifest has them."""

from collections.abc import Sequence

from qwen3_omni_neuron.compiled.artifact import Call
from qwen3_omni_neuron.compiled.artifact import TensorSpec as Recorded
from qwen3_omni_neuron.config import OmniConfig
from qwen3_omni_neuron.graphs.all import all_graphs
from qwen3_omni_neuron.graphs.graph import TensorSpec
from qwen3_omni_neuron.plan import GRAPH_PARTS, CompilePlan


def graph_calls(config: OmniConfig, plan: CompilePlan, graph: str) -> tuple[Call, ...]:
    """Every way to call one of plan.GRAPHS, at every bucket of a plan."""
    return tuple(
        Call(
            row.name,
            row.bucket,
            _recorded(row.inputs),
            _recorded(row.outputs),
            _recorded(row.state),
        )
        for row in all_graphs(config, plan)
        if row.part in GRAPH_PARTS[graph]
    )


def _recorded(specs: Sequence[TensorSpec]) -> dict[str, Recorded]:
    return {s.name: Recorded(s.shape, str(s.dtype).removeprefix("torch.")) for s in specs}
