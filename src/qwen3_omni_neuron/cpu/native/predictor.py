"""Code predictor in C: one call per frame."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native._declarations import ffi
from qwen3_omni_neuron.cpu.native.binding import (
    NO_SUCH_ROW,
    Library,
    Weights,
    address_of,
    check,
    native_decoder,
    pointer_to,
)
from qwen3_omni_neuron.engines.inputs import sampling_arrays
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import TalkerConfig


class NativePredictor:
    """The code predictor in C: a Predictor in float32 over the module's weights.

    It sums in another order than the module: if two scores differ by no more than float32's
    rounding error, either code may be chosen. A slot's result does not depend on other slots.
    Thread-safe. Raises UnsuitedError.
    """

    def __init__(
        self, c: TalkerConfig, predictor: CodePredictor, library: Library, threads: int = 1
    ):
        p, self._steps = c.predictor, c.code_groups - 1
        self._hidden, self._vocab, self._code0_vocab = (
            p.hidden_size, p.vocab_size, c.text.vocab_size
        )  # fmt: skip
        self._run = library.predict_frame
        self._weights = weights = Weights()
        half, tables = p.head_dim // 2, (self._steps, p.vocab_size, p.hidden_size)
        cos, sin = (table[:, 0] for table in predictor.rotary.span(0, c.code_groups))
        fields = {
            "decoder": native_decoder(p, predictor.decoder, weights),
            "steps": self._steps,
            "cosine": weights(cos[:, half:].contiguous(), c.code_groups, half),
            "sine": weights(sin[:, half:].contiguous(), c.code_groups, half),
            "code0_embedding": weights.table(
                predictor.code0_embedding.weight, self._code0_vocab, p.hidden_size
            ),
            "embedding": weights.table(predictor.embedding, *tables),
            "head": weights.matrix(predictor, "head", *tables),
            "threads": threads,
        }
        self._predictor = ffi.new("Predictor *", fields)

    def predict(
        self,
        slots: Sequence[int],
        code0: Sequence[int],
        sampling: Sequence[PredictorSampling],
        hidden: Tensor,
        feedback: Tensor,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Complete a frame of each slot.

        logits: float32 [15, n, vocab], receives the logits. Raises ValueError, and IndexError for a
        slot or code 0 beyond the tables.
        """
        count, all_slots = len(slots), len(hidden)
        if not 0 <= min(slots) <= max(slots) < all_slots:
            raise IndexError(f"slots {list(slots)}, and there are {all_slots}")
        how: tuple[Any, ...] = ffi.NULL, ffi.NULL, ffi.NULL
        if any(frame.noise is not None for frame in sampling):
            noise, top_p, top_k = sampling_arrays(sampling, self._steps, self._vocab)
            how = ffi.from_buffer("float[]", noise), top_p, top_k
        codes = torch.from_numpy(np.empty((count, self._steps + 1), np.int64))
        written = ffi.NULL
        if logits is not None:
            written = pointer_to(logits, torch.float32, self._steps, count, self._vocab)
        status = self._run(
            self._predictor,
            count,
            list(slots),
            pointer_to(hidden, torch.float32, all_slots, self._hidden),
            list(code0),
            *how,
            address_of(codes),
            pointer_to(feedback, torch.float32, all_slots, self._hidden),
            written,
        )
        if status == NO_SUCH_ROW:
            raise IndexError(f"code 0 is {list(code0)}, and its table has {self._code0_vocab} rows")
        check(status)
        return codes
