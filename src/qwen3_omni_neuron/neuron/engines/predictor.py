"""The code predictor on Neuron."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.inputs import sampling_inputs
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.neuron.engines.encoders import batches, pad_rows
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.part import LoadedPart, graphs_by_size


class NeuronPredictor:
    """An engines.protocols.Predictor over neuron.graphs.parts.predictor_graph.

    One graph serves greedy frames, another sampled frames of any top_k up to the compiled one.

    codes: size of the vocabulary that each code is chosen from.
    """

    def __init__(self, part: LoadedPart, codes: int):
        self._part, self._codes = part, codes
        greedy = graphs_by_size(part, "code_predictor_greedy", "slots")
        sampled = graphs_by_size(part, "code_predictor_sampled", "slots")
        self._greedy = {slots: graph for (slots,), graph in greedy.items()}
        self._sampled = {slots: graph for (slots,), graph in sampled.items()}
        self._most = min(graph.size("top_k") for graph in sampled.values())

    def predict(
        self, hidden: Tensor, code0: Tensor, sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        """Choose the rest of each frame; see Predictor.predict.

        Raises BucketError for a top_k above the compiled one.
        """
        sampled = [row for row, how in enumerate(sampling) if how.uniforms is not None]
        if not sampled:
            return self._run(self._greedy, (hidden, code0))
        chosen = [sampling[row] for row in sampled]
        limits = torch.tensor([self._limit(how.top_k) for how in chosen])
        if len(chosen) == len(sampling):
            return self._run(self._sampled, (hidden, code0, *sampling_inputs(chosen), limits))
        greedy = [row for row, how in enumerate(sampling) if how.uniforms is None]
        first = self._run(self._greedy, (hidden[greedy], code0[greedy]))
        inputs = hidden[sampled], code0[sampled], *sampling_inputs(chosen), limits
        second = self._run(self._sampled, inputs)
        in_order = torch.tensor(greedy + sampled).argsort()
        codes, feedback = (torch.cat(pair)[in_order] for pair in zip(first, second, strict=True))
        return codes, feedback

    def _limit(self, top_k: int) -> int:
        """Return top_k for the graph: 0, or more than there are codes, means all codes."""
        limit = min(top_k or self._codes, self._codes)
        if limit > self._most:
            raise BucketError(
                f"predictor_top_k is {top_k}{'' if top_k else ' (no limit)'}, and the code "
                f"predictor was compiled to choose from at most {self._most} codes. Ask for 1 to "
                f"{self._most}, or compile it for more."
            )
        return limit

    def _run(self, graphs: dict[int, Graph], inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Run rows in compiled batches, usually one. Padding rows have each input's idle value."""
        outputs, talker_type = [], inputs[0].dtype
        for rows, size in batches(len(inputs[0]), list(graphs)):
            graph = graphs[size]
            padded = [
                # The hidden state has the type of the talker, and the graph that of its arithmetic.
                pad_rows(tensor[rows].to(spec.dtype), size, spec.idle)
                for tensor, spec in zip(inputs, graph.inputs, strict=True)
            ]
            outputs.append(
                [o[: rows.stop - rows.start] for o in self._part.call(graph.label, *padded)]
            )
        if len(outputs) == 1:
            codes, feedback = outputs[0]
            return codes, feedback.to(talker_type)
        codes, feedback = (torch.cat(each) for each in zip(*outputs, strict=True))
        return codes, feedback.to(talker_type)
