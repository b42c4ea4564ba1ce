"""One of the talker's projections on Neuron."""

import torch
from torch import Tensor

from qwen3_omni_neuron.neuron.engine.batches import batches, pad_rows
from qwen3_omni_neuron.neuron.part.part import LoadedPart, graphs_by_size


class NeuronProjection:
    """Thinker rows to talker rows. name: "text_projection" or "hidden_projection"."""

    def __init__(self, part: LoadedPart, name: str):
        self._part = part
        graphs = graphs_by_size(part, name, "rows")
        self._labels = {rows: graph.label for (rows,), graph in graphs.items()}
        first = next(iter(graphs.values()))
        self._dtype, self._width = first.inputs[0].dtype, first.outputs[0].lengths[1]

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, thinker hidden] -> [rows, talker hidden]."""
        rows = torch.empty(len(x), self._width, dtype=self._dtype)
        for some, size in batches(len(x), list(self._labels)):
            (projected,) = self._part.call(
                self._labels[size], pad_rows(x[some].to(self._dtype), size)
            )
            rows[some] = projected[: some.stop - some.start]
        return rows
