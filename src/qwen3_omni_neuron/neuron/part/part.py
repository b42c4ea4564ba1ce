"""A part of the model on Neuron: its graphs over one set of weights and one state."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from qwen3_omni_neuron.errors import ArtifactError
from qwen3_omni_neuron.graphs.graph import Graph


class LoadedPart(Protocol):
    """The compiled graphs of one part, loaded. Weights and state stay on the part's cores.

    graphs: by label; they share the state, whose specs are the same in all that have one. It is
    zeros when the part is loaded.
    """

    graphs: Mapping[str, Graph]

    def call(self, label: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the graph of this label. inputs: on the host, in shape and type those of
        Graph.inputs. Returns Graph.outputs, on the host; the state is renewed where it lies."""
        ...

    def close(self) -> None:
        """Give the part's memory back."""
        ...


def graphs_by_size(part: LoadedPart, name: str, *axes: str) -> dict[tuple[int, ...], Graph]:
    """The graphs of one name by their sizes along `axes`, ascending.

    Raises ArtifactError where there is none.
    """
    alike = [graph for graph in part.graphs.values() if graph.name == name]
    if not alike:
        raise ArtifactError(
            f"the compiled part has no graph {name} among {', '.join(part.graphs) or 'none'}. "
            "Compile it again."
        )
    by_size = {tuple(graph.size(axis) for axis in axes): graph for graph in alike}
    return dict(sorted(by_size.items()))
