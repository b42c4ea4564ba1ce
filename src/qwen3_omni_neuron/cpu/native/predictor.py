"""The code predictor in C: one call a frame, where the graph of torch operations has 700."""

import ctypes
import logging
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen3_omni_neuron.config import TalkerConfig
from qwen3_omni_neuron.model.code_predictor import CodePredictor

logger = logging.getLogger(__name__)

MOST_PRODUCTS = 4_000_000
"""A step's multiplications, of all slots, up to which C is the faster. The graph takes the time of
its operations' calls and of torch's arithmetic, C that of its own arithmetic, which is plainer and
on one thread: beyond this the calls are the smaller part. See BENCHMARK.md."""

NO_MEMORY, NO_SUCH_CODE = 1, 2


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("attention_norm", "qkv", "qk_norm", "out", "ffn_norm", "gate_up", "down")
    ]


class _Predictor(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "steps", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "code0_vocab",
            "layers",
        )),
        ("layer", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in (
            "norm", "cos", "sin", "code0_embedding", "embedding", "head",
        )),
        ("norm_eps", ctypes.c_float),
    ]  # fmt: skip


@cache
def find_library() -> ctypes.CDLL | None:
    """What the installation compiled from predictor.c; None where it could not."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_predictor{suffix}")
        if path.exists():
            library = ctypes.CDLL(str(path))  # its calls let other threads of Python run
            number, pointer = ctypes.c_int64, ctypes.c_void_p
            library.predict_frame.argtypes = [
                ctypes.POINTER(_Predictor), number, *[pointer] * 4, number, *[pointer] * 3
            ]  # fmt: skip
            return library
    return None


def native_predictor(c: TalkerConfig, predictor: CodePredictor) -> "NativePredictor | None":
    """The predictor in C where it was compiled, can take these weights, and is the faster."""
    library = find_library()
    if library is None:
        logger.info("code predictor: a graph of torch operations, as the C one was not compiled")
        return None
    try:
        native = NativePredictor(c, predictor, library)
    except ValueError as refused:
        logger.info("code predictor: a graph of torch operations, as %s", refused)
        return None
    if native.most_slots == 0:
        logger.info("code predictor: a graph of torch operations, the faster at this size")
        return None
    logger.info("code predictor: in C up to %d slots at a time", native.most_slots)
    return native


class NativePredictor:
    """CodePredictor.forward over the module's own weights, in float32.

    The results are the module's but for the order in which float32 sums are added up: where two
    logits, or a draw and a boundary, lie within such a rounding, either code may be chosen. Of
    equal logits the smaller id is the likelier, where torch's topk leaves that open.
    Several threads may call it at once. most_slots: in a call, up to which it is the faster; none
    for the released sizes.
    Raises ValueError where a width is not a multiple of 8, or a weight is not float32 in the
    computer's memory, dense, and of the config's shape.
    """

    def __init__(self, c: TalkerConfig, predictor: CodePredictor, library: ctypes.CDLL):
        p, steps = c.predictor, c.code_groups - 1
        widths = (p.hidden_size, p.head_dim, p.ffn_width, p.vocab_size)
        if any(width % 8 for width in widths):
            raise ValueError(f"the native code predictor takes multiples of 8, got {widths}")
        weights = sum(weight.numel() for weight in predictor.decoder.parameters())
        self.most_slots = MOST_PRODUCTS // (weights + p.vocab_size * p.hidden_size)
        self._steps, self._hidden, self._vocab = steps, p.hidden_size, p.vocab_size
        self._run = library.predict_frame
        self._held: list[Tensor] = []  # C reads where these lie
        qk_heads = p.heads + p.kv_heads
        qkv_width = (qk_heads + p.kv_heads) * p.head_dim

        def pointer(weight: Tensor, *shape: int) -> int:
            self._held.append(weight.detach())
            return _pointer(weight, torch.float32, *shape)

        def fields(layer: Any) -> _Layer:
            attention, ffn = layer.attention, layer.ffn
            return _Layer(
                attention_norm=pointer(layer.attention_norm.weight, p.hidden_size),
                qkv=pointer(attention.qkv.weight, qkv_width, p.hidden_size),
                qk_norm=pointer(attention.qk_norm.weight, qk_heads, p.head_dim),
                out=pointer(attention.out.weight, p.hidden_size, p.heads * p.head_dim),
                ffn_norm=pointer(layer.ffn_norm.weight, p.hidden_size),
                gate_up=pointer(ffn.gate_up.weight, 2 * p.ffn_width, p.hidden_size),
                down=pointer(ffn.down.weight, p.hidden_size, p.ffn_width),
            )

        layers = [fields(layer) for layer in predictor.decoder.layers]
        code0_embedding = predictor.code0_embedding.weight
        tables = (steps, p.vocab_size, p.hidden_size)
        self._predictor = _Predictor(
            steps=steps,
            hidden=p.hidden_size,
            heads=p.heads,
            kv_heads=p.kv_heads,
            head_dim=p.head_dim,
            ffn=p.ffn_width,
            vocab=p.vocab_size,
            code0_vocab=c.text.vocab_size,
            layers=len(layers),
            layer=(_Layer * len(layers))(*layers),
            norm=pointer(predictor.decoder.norm.weight, p.hidden_size),
            cos=pointer(predictor.rotary.cos[:, 0], c.code_groups, p.head_dim),
            sin=pointer(predictor.rotary.sin[:, 0], c.code_groups, p.head_dim),
            code0_embedding=pointer(code0_embedding, c.text.vocab_size, p.hidden_size),
            embedding=pointer(predictor.embedding, *tables),
            head=pointer(predictor.head, *tables),
            norm_eps=p.norm_eps,
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
        """As CodePredictor.forward. logits: float32 [15, slots, vocab], written where it is given.

        Raises ValueError for a tensor of another shape or type, IndexError for a code 0 beyond the
        table.
        """
        slots = len(code0)
        codes = torch.empty((slots, self._steps + 1), dtype=torch.int64)
        feedback = torch.empty((slots, self._hidden))
        how: tuple[int | None, int | None] = None, None
        if uniforms is not None and top_p is not None:
            how = (
                _pointer(uniforms, torch.float32, slots, self._steps),
                _pointer(top_p, torch.float32, slots),
            )
        status = self._run(
            self._predictor,
            slots,
            _pointer(hidden, torch.float32, slots, self._hidden),
            _pointer(code0, torch.int64, slots),
            *how,
            top_k,
            codes.data_ptr(),
            feedback.data_ptr(),
            logits if logits is None
            else _pointer(logits, torch.float32, self._steps, slots, self._vocab),
        )  # fmt: skip
        if status == NO_SUCH_CODE:
            size = self._predictor.code0_vocab
            raise IndexError(f"code 0 is {code0.tolist()}, and its table has {size} rows")
        if status == NO_MEMORY:
            raise MemoryError(f"the code predictor's rows of {slots} slots")
        return codes, feedback


def _pointer(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Where a dense tensor of this type and shape begins."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"the native code predictor takes {dtype} {list(shape)} on the CPU here, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"the native code predictor takes dense tensors, got {tensor.stride()}")
    return tensor.data_ptr()
