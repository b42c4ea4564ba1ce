"""A part of the model on Neuron: its graphs over one set of weights and one state."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from qwen3_omni_neuron.errors import ArtifactError, BucketError, ClosedError, InputError
from qwen3_omni_neuron.graphs.graph import Graph, TensorSpec
from qwen3_omni_neuron.neuron.part.device_types import to_device_type
from qwen3_omni_neuron.neuron.part.spec import PartSpec


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


Run = Callable[[str, dict[str, Tensor]], Sequence[Tensor]]
"""(label, inputs by name) -> outputs, both in the types of the device."""


class CheckedPart:
    """Serves neuron.part.LoadedPart.

    run: calls a graph. Dropped at close, and with it what it holds.
    """

    def __init__(self, spec: PartSpec, run: Run):
        self.graphs: Mapping[str, Graph] = {graph.label: graph for graph in spec.graphs}
        self._name = spec.name
        self._run: Run | None = run

    def call(self, label: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        """As LoadedPart.call.

        Raises BucketError for a label or a shape that was not compiled, InputError for inputs of
        another number or type, ClosedError after close.
        """
        if self._run is None:
            raise ClosedError(f"{self._name} was closed. Load it again.")
        graph = self._graph(label)
        if len(inputs) != len(graph.inputs):
            names = ", ".join(spec.name for spec in graph.inputs)
            raise InputError(
                f"{label} takes {len(graph.inputs)} inputs ({names}), got {len(inputs)}."
            )
        given = {}
        for spec, tensor in zip(graph.inputs, inputs, strict=True):
            _check(label, spec, tensor)
            given[spec.name] = to_device_type(tensor)
        outputs = self._run(label, given)
        return tuple(
            tensor.to(spec.dtype) for spec, tensor in zip(graph.outputs, outputs, strict=True)
        )

    def close(self) -> None:
        """Give the part's memory back. Calls that follow are refused."""
        self._run = None

    def _graph(self, label: str) -> Graph:
        graph = self.graphs.get(label)
        if graph is None:
            raise BucketError(
                f"{self._name} was compiled with {', '.join(self.graphs)}; it has no {label!r}. "
                "Call one of them, or compile this one."
            )
        return graph


def _check(label: str, spec: TensorSpec, tensor: Tensor) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise BucketError(
            f"{spec.name} of {label} is {list(spec.shape)}, got {list(tensor.shape)}. Pad it to "
            "that, or call the graph of its size."
        )
    if tensor.dtype != spec.dtype:
        raise InputError(f"{spec.name} of {label} is {spec.dtype}, got {tensor.dtype}. Convert it.")
