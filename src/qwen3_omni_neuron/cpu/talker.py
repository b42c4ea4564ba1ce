"""Parts of the talker's engine on the CPU: its code predictor, and the tables of its rows."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.inputs import sampling_inputs
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.engines.talker import ROWS_AT_ONCE, TextRows


class CpuPredictor:
    """Code predictor over one of fixed top_k; see engines.protocols.Predictor.

    run: model.code_predictor.CodePredictor, or a function that computes the same. arithmetic: type
    that it is to compute in.
    """

    def __init__(
        self,
        run: Callable[..., tuple[Tensor, Tensor]],
        code_groups: int,
        arithmetic: torch.dtype = torch.float32,
    ):
        self._run, self._code_groups, self._arithmetic = run, code_groups, arithmetic

    @torch.inference_mode()
    def predict(
        self, hidden: Tensor, code0: Tensor, sampling: Sequence[PredictorSampling]
    ) -> tuple[Tensor, Tensor]:
        """Predict the codes of frames; see Predictor.predict.

        Frames with the same top_k share one call.
        """
        rows_by_top_k: dict[int | None, list[int]] = {}
        for row, frame in enumerate(sampling):
            rows_by_top_k.setdefault(_top_k(frame), []).append(row)
        if len(rows_by_top_k) == 1:
            return self._predict_uniform(hidden, code0, sampling)
        codes = code0.new_empty(len(sampling), self._code_groups)
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
        hidden = hidden.to(self._arithmetic)
        if sampling[0].uniforms is None:
            return self._run(hidden, code0)
        return self._run(hidden, code0, *sampling_inputs(sampling), top_k=sampling[0].top_k)


def _top_k(sampling: PredictorSampling) -> int | None:
    """Return a frame's top_k, or None where it is greedy."""
    return None if sampling.uniforms is None else sampling.top_k


def talker_tables(models: Models, spec: EngineSpec) -> tuple[Tensor, TextRows]:
    """Return the codec's table [codec vocab, hidden] and the rows of text tokens."""
    assert spec.config.talker and models.codec_embedding
    assert models.embedding and models.text_projection
    table, width = models.embedding.weight.detach(), spec.config.talker.text.hidden_size
    text_rows = TextRows(table, models.text_projection, width, spec.dtype)
    if len(table) <= ROWS_AT_ONCE:
        text_rows.fill()  # in one call now, so that no frame waits for a row
    return models.codec_embedding.weight.detach().to(spec.dtype), text_rows
