"""Code predictor in C: one call a frame."""

import ctypes

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native.binding import (
    NO_SUCH_CODE,
    Matrix,
    NativeDecoder,
    Number,
    Pointer,
    Table,
    Weights,
    check,
    native_decoder,
    pointer_to,
)
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.config import TalkerConfig


class _Predictor(ctypes.Structure):
    """Predictor of predictor.c."""

    _fields_ = [
        ("decoder", NativeDecoder),
        ("steps", Number),
        *((name, Pointer) for name in ("cosine", "sine")),
        *((name, Table) for name in ("code0_embedding", "embedding")),
        ("head", Matrix),
        ("threads", Number),
    ]


STRUCTS = {"Predictor": _Predictor}


class NativePredictor:
    """CodePredictor.forward in C over the module's own weights, in float32.

    The results differ from the module's only because float32 sums are added up in another order:
    where two logits, or a draw and a boundary, are as close as such a rounding error, either code
    may be chosen. Of equal logits the one with the smaller id ranks first; torch's topk leaves that
    open. A slot's result does not depend on the other slots. Several threads may call it at once.
    Raises UnsuitedError where the C can't take the weights.
    """

    def __init__(
        self, c: TalkerConfig, predictor: CodePredictor, library: ctypes.CDLL, threads: int = 1
    ):
        p, self._steps = c.predictor, c.code_groups - 1
        self._hidden, self._vocab, self._code0_vocab = (
            p.hidden_size, p.vocab_size, c.text.vocab_size
        )  # fmt: skip
        self._run = library.predict_frame
        self._weights = weights = Weights()
        half, tables = p.head_dim // 2, (self._steps, p.vocab_size, p.hidden_size)
        cos, sin = (table[:, 0] for table in predictor.rotary.span(0, c.code_groups))
        self._predictor = _Predictor(
            decoder=native_decoder(p, predictor.decoder, weights),
            steps=self._steps,
            cosine=weights(cos[:, half:].contiguous(), c.code_groups, half),
            sine=weights(sin[:, half:].contiguous(), c.code_groups, half),
            code0_embedding=weights.table(
                predictor.code0_embedding.weight, self._code0_vocab, p.hidden_size
            ),
            embedding=weights.table(predictor.embedding, *tables),
            head=weights.matrix(predictor, "head", *tables),
            threads=threads,
        )

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
        slots = len(code0)
        codes = torch.empty((slots, self._steps + 1), dtype=torch.int64)
        feedback = torch.empty((slots, self._hidden))
        how: tuple[int | None, int | None] = None, None
        if uniforms is not None and top_p is not None:
            how = (
                pointer_to(uniforms, torch.float32, slots, self._steps),
                pointer_to(top_p, torch.float32, slots),
            )
        written = None
        if logits is not None:
            written = pointer_to(logits, torch.float32, self._steps, slots, self._vocab)
        status = self._run(
            ctypes.byref(self._predictor),
            slots,
            pointer_to(hidden, torch.float32, slots, self._hidden),
            pointer_to(code0, torch.int64, slots),
            *how,
            top_k,
            codes.data_ptr(),
            feedback.data_ptr(),
            written,
        )
        if status == NO_SUCH_CODE:
            raise IndexError(
                f"code 0 is {code0.tolist()}, and its table has {self._code0_vocab} rows"
            )
        check(status)
        return codes, feedback
