"""The code predictor on the CPU."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native.installed import native_predictor
from qwen3_omni_neuron.cpu.traced import trace_graph
from qwen3_omni_neuron.engines.inputs import sampling_inputs
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import TalkerConfig

DEFAULT_TOP_K = 50
GREEDY = None  # in place of a top_k

Predict = Callable[..., tuple[Tensor, Tensor]]


class CpuPredictor:
    """Code predictor over model.code_predictor; see engines.protocols.Predictor.

    It runs in C if it can. Otherwise there is a traced graph for each top_k, which is the size of
    an axis in it, and one for greedy decoding.
    """

    def __init__(self, c: TalkerConfig, predictor: CodePredictor):
        self._predictor = predictor
        self._native = native_predictor(c, predictor)
        self._by_top_k: dict[int | None, Predict] = {}
        for top_k in (GREEDY, DEFAULT_TOP_K):  # now, so that the first frame does not wait
            self._function(top_k)

    def predict(
        self, hidden: Tensor, code0: Tensor, sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        """Predict the codes of frames; see Predictor.predict.

        Frames of one top_k are one call.
        """
        rows_by_top_k: dict[int | None, list[int]] = {}
        for row, frame in enumerate(sampling):
            rows_by_top_k.setdefault(_top_k(frame), []).append(row)
        if len(rows_by_top_k) == 1:
            return self._predict_uniform(hidden, code0, sampling)
        codes = code0.new_empty(len(sampling), self._predictor.steps + 1)
        feedback = torch.empty_like(hidden)
        for rows in rows_by_top_k.values():
            codes[rows], feedback[rows] = self._predict_uniform(
                hidden[rows], code0[rows], [sampling[row] for row in rows]
            )
        return codes, feedback

    def _predict_uniform(
        self, hidden: Tensor, code0: Tensor, sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        """Predict frames that have the same top_k, in one call."""
        predict = self._function(_top_k(sampling[0]))
        if sampling[0].uniforms is None:
            return predict(hidden, code0)
        return predict(hidden, code0, *sampling_inputs(sampling))

    def _function(self, top_k: int | None) -> Predict:
        """Return the function for a top_k; trace it if it is new."""
        if top_k not in self._by_top_k:
            function: Predict = self._native or self._predictor
            if top_k is not GREEDY:
                function = partial(function, top_k=top_k)
            self._by_top_k[top_k] = function if self._native else self._trace(top_k, function)
        return self._by_top_k[top_k]

    def _trace(self, top_k: int | None, function: Predict) -> Predict:
        # Two slots: with one, the tracer would make the number of slots a constant.
        example = [self._predictor.code0_embedding.weight[:2], torch.tensor([0, 1])]
        if top_k is not GREEDY:
            example += [torch.zeros(2, self._predictor.steps), torch.tensor([0.8, 0.8])]
        return trace_graph(self._predictor, function, *example)


def _top_k(sampling: PredictorSampling) -> int | None:
    return GREEDY if sampling.uniforms is None else sampling.top_k
