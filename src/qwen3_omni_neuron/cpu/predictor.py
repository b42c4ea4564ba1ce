"""The code predictor on the CPU."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.graph import trace_graph
from qwen3_omni_neuron.engine.predictor import draws
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.runtime.protocols import PredictorSampling

DEFAULT_TOP_K = 50
GREEDY = None  # in the place of a top_k

PredictGraph = Callable[..., tuple[Tensor, Tensor]]


class CpuPredictor:
    """Serves engine.predictor.Predictor: a traced graph for each top_k, which is a shape in it,
    and one for greedy."""

    def __init__(self, predictor: CodePredictor):
        self._predictor = predictor
        self._by_top_k: dict[int | None, PredictGraph] = {}
        for top_k in (GREEDY, DEFAULT_TOP_K):  # now, rather than on the path of a first frame
            self._graph(top_k)

    def predict(
        self, hidden: Tensor, code0: Tensor, sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        if len(sampling) == 1:
            return self._alike(hidden, code0, sampling)
        by_graph: dict[int | None, list[int]] = {}
        for row, how in enumerate(sampling):
            by_graph.setdefault(_key(how), []).append(row)
        if len(by_graph) == 1:
            return self._alike(hidden, code0, sampling)
        codes = code0.new_empty(len(sampling), self._predictor.steps + 1)
        feedback = torch.empty_like(hidden)
        for rows in by_graph.values():
            codes[rows], feedback[rows] = self._alike(
                hidden[rows], code0[rows], [sampling[row] for row in rows]
            )
        return codes, feedback

    def _alike(
        self, hidden: Tensor, code0: Tensor, sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        """One graph for frames that are sampled alike."""
        graph = self._graph(_key(sampling[0]))
        if sampling[0].uniforms is None:
            return graph(hidden, code0)
        return graph(hidden, code0, *draws(sampling))

    def _graph(self, top_k: int | None) -> PredictGraph:
        if top_k not in self._by_top_k:
            # Two slots, so that the number of slots is no constant in the graph.
            code0 = torch.tensor([0, 1])
            example = [self._predictor.code0_embedding.weight[:2], code0]
            function: PredictGraph = self._predictor
            if top_k is not GREEDY:
                example += [torch.zeros(2, self._predictor.steps), torch.tensor([0.8, 0.8])]
                function = partial(self._predictor, top_k=top_k)
            self._by_top_k[top_k] = trace_graph(self._predictor, function, *example)
        return self._by_top_k[top_k]


def _key(sampling: PredictorSampling) -> int | None:
    return GREEDY if sampling.uniforms is None else sampling.top_k
