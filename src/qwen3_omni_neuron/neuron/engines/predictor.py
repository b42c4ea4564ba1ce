"""The code predictor on Neuron."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.engines.inputs import sampling_arrays
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.model.code_predictor import top_p_limits
from qwen3_omni_neuron.neuron.engines.encoders import pad_rows
from qwen3_omni_neuron.neuron.part import LoadedPart, graphs_by_size


class NeuronPredictor:
    """An engines.protocols.Predictor over neuron.graphs.parts.predictor_graph.

    Its graph takes a row for each slot, greedy and sampled together, of any top_k up to the
    compiled one.

    codes: size of the vocabulary that each code is chosen from.
    """

    def __init__(self, part: LoadedPart, codes: int):
        self._part, self._codes = part, codes
        *_, self._graph = graphs_by_size(part, "code_predictor", "slots").values()
        self._most = self._graph.size("top_k")

    def predict(
        self,
        slots: Sequence[int],
        code0: Sequence[int],
        sampling: Sequence[PredictorSampling],
        hidden: Tensor,
        feedback: Tensor,
    ) -> Tensor:
        """Choose the rest of each frame; see Predictor.predict.

        Raises BucketError for a top_k above the compiled one.
        """
        rows = list(slots)
        uniforms, top_p, top_k = sampling_arrays(sampling, self._graph.inputs[2].shape[1])
        limits = torch.tensor([self._limit(k) for k in top_k])
        how = torch.from_numpy(uniforms), top_p_limits(top_p), limits
        codes, feedback[rows] = self._run((hidden[rows], torch.tensor(code0), *how))
        return codes

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

    def _run(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Run rows. Padding rows have each input's idle value."""
        count, talker_type = len(inputs[0]), inputs[0].dtype
        padded = [
            # The hidden state has the type of the talker, and the graph that of its arithmetic.
            pad_rows(tensor.to(spec.dtype), self._graph.size("slots"), spec.idle)
            for tensor, spec in zip(inputs, self._graph.inputs, strict=True)
        ]
        codes, feedback = self._part.call(self._graph.label, *padded)
        return codes[:count], feedback[:count].to(talker_type)
