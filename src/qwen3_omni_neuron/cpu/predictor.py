"""The code predictor on the CPU."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native.choice import native_predictor
from qwen3_omni_neuron.cpu.traced import trace_graph
from qwen3_omni_neuron.engines.inputs import sampling_inputs
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import TalkerConfig

DEFAULT_TOP_K = 50
GREEDY = None  # in the place of a top_k

Predict = Callable[..., tuple[Tensor, Tensor]]


class CpuPredictor:
    """Serves engine.predictor.Predictor: in C where that can be had; else a traced graph for each
    top_k, which is a shape in it, and one for greedy."""

    def __init__(self, c: TalkerConfig, predictor: CodePredictor):
        self._predictor = predictor
        self._native = native_predictor(c, predictor)
        self._by_top_k: dict[int | None, Predict] = {}
        for top_k in (GREEDY, DEFAULT_TOP_K):  # now, rather than on the path of a first frame
            self._of(top_k)

    def predict(
        self, hidden: Tensor, code0: Tensor, sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        if len(sampling) == 1:
            return self._alike(hidden, code0, sampling)
        by_call: dict[int | None, list[int]] = {}
        for row, how in enumerate(sampling):
            by_call.setdefault(_key(how), []).append(row)
        if len(by_call) == 1:
            return self._alike(hidden, code0, sampling)
        codes = code0.new_empty(len(sampling), self._predictor.steps + 1)
        feedback = torch.empty_like(hidden)
        for rows in by_call.values():
            codes[rows], feedback[rows] = self._alike(
                hidden[rows], code0[rows], [sampling[row] for row in rows]
            )
        return codes, feedback

    def _alike(
        self, hidden: Tensor, code0: Tensor, sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        """One call for frames that are sampled alike."""
        predict = self._of(_key(sampling[0]))
        if sampling[0].uniforms is None:
            return predict(hidden, code0)
        return predict(hidden, code0, *sampling_inputs(sampling))

    def _of(self, top_k: int | None) -> Predict:
        if top_k not in self._by_top_k:
            function: Predict = self._native or self._predictor
            if top_k is not GREEDY:
                function = partial(function, top_k=top_k)
            self._by_top_k[top_k] = function if self._native else self._graph(top_k, function)
        return self._by_top_k[top_k]

    def _graph(self, top_k: int | None, function: Predict) -> Predict:
        # Two slots, so that the number of slots is no constant in the graph.
        example = [self._predictor.code0_embedding.weight[:2], torch.tensor([0, 1])]
        if top_k is not GREEDY:
            example += [torch.zeros(2, self._predictor.steps), torch.tensor([0.8, 0.8])]
        return trace_graph(self._predictor, function, *example)


def _key(sampling: PredictorSampling) -> int | None:
    return GREEDY if sampling.uniforms is None else sampling.top_k
