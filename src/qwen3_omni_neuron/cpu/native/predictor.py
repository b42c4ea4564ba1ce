"""Code predictor in C: one call a frame."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.cpu.native._declarations import ffi
from qwen3_omni_neuron.cpu.native.binding import (
    NO_SUCH_ROW,
    Library,
    Weights,
    address_of,
    check,
    check_dense,
    native_decoder,
    pointer_to,
)
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import TalkerConfig


class NativePredictor:
    """CodePredictor.forward in C over the module's own weights, in float32.

    The results differ from the module's only because float32 sums are added up in another order:
    where two logits, or a random number and a boundary, are as close as such a rounding error,
    either code may be chosen. Among equal logits the smaller id ranks first; torch's topk does not
    define this order. A slot's result does not depend on the other slots. Several threads may call
    it at once.
    Raises UnsuitedError where the C can't take the weights.
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

    def __call__(
        self,
        hidden: Tensor,
        code0: Tensor,
        uniforms: Tensor | None = None,
        top_p: Tensor | None = None,
        top_k: int = 50,
        logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predict a frame; see CodePredictor.forward.

        logits: float32 [15, slots, vocab], which receives the logits if it is given.
        Raises ValueError for a tensor of another shape or type, IndexError for a code 0 beyond the
        table.
        """
        slots, feedback = len(code0), torch.empty_like(hidden)
        check_dense(hidden, torch.float32, slots, self._hidden)
        check_dense(code0, torch.int64, slots)
        rows, ids = range(slots), code0.tolist()
        if uniforms is None or top_p is None:
            return self.frames(rows, ids, hidden, feedback, logits=logits), feedback
        check_dense(uniforms, torch.float32, slots, self._steps)
        check_dense(top_p, torch.float32, slots)
        how = uniforms.numpy(), top_p.tolist(), [top_k] * slots
        return self.frames(rows, ids, hidden, feedback, *how, logits), feedback

    def frames(
        self,
        rows: Sequence[int],
        code0: Sequence[int],
        hidden: Tensor,
        feedback: Tensor,
        uniforms: NDArray[np.float32] | None = None,
        top_p: Sequence[float] = (),
        top_k: Sequence[int] = (),
        logits: Tensor | None = None,
    ) -> Tensor:
        """Predict frames of some slots; hidden and feedback are tables of all slots.

        rows: row of each slot in hidden and feedback, float32 [all slots, hidden]. uniforms:
        [slots, 15], None for greedy; top_p and top_k: one a slot. Returns the codes int64
        [slots, 16]; otherwise as `__call__`.
        """
        slots, all_slots = len(rows), len(hidden)
        if not 0 <= min(rows) <= max(rows) < all_slots:
            raise IndexError(f"rows {list(rows)}, and there are {all_slots}")
        codes = torch.from_numpy(np.empty((slots, self._steps + 1), np.int64))
        written = ffi.NULL
        if logits is not None:
            written = pointer_to(logits, torch.float32, self._steps, slots, self._vocab)
        status = self._run(
            self._predictor,
            slots,
            list(rows),
            pointer_to(hidden, torch.float32, all_slots, self._hidden),
            list(code0),
            ffi.NULL if uniforms is None else ffi.from_buffer("float[]", uniforms),
            ffi.NULL if uniforms is None else list(top_p),
            ffi.NULL if uniforms is None else list(top_k),
            address_of(codes),
            pointer_to(feedback, torch.float32, all_slots, self._hidden),
            written,
        )
        if status == NO_SUCH_ROW:
            raise IndexError(f"code 0 is {list(code0)}, and its table has {self._code0_vocab} rows")
        check(status)
        return codes
