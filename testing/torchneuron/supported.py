"""Operations that TorchNeuron decomposes and lowers, as far as the graphs here use them.

Source: aws-neuron/torch-neuronx v2.33.0, torch_neuronx/neuron_dynamo_backend/decompositions.py
(the names, and that attention becomes plain products), and
llvm/torch-mlir, lib/Dialect/Torch/Transforms/DecomposeComplexOps.cpp and
lib/Conversion/TorchToStablehlo/. Decompositions here are our own. Indexed writes, which TorchNeuron
makes scatters of single numbers, are left out: no graph may have one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Decomposed by torch's own rules before anything else sees them.
DECOMPOSED = (
    *(aten.logsumexp, aten.squeeze.dims, aten.addr, aten._unsafe_index),
    *(aten.split, aten.split_with_sizes, aten.unbind, aten.embedding, aten.clamp_min),
    *(aten.clamp_max, aten.fill.Scalar, aten.fill.Tensor, aten.lerp, aten.elu),
    aten.silu,
)


def _scalar_tensor(value: float, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend by plain products, as the device does wherever there is a mask.

    On the device, _scaled_dot_product_fused_attention_overrideable stands in the place of this CPU
    operation. Without a mask and with lengths that are multiples of 512 the device takes a kernel
    instead.
    """
    assert not dropout_p
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(hidden.triu(columns - rows + 1), float("-inf"))
    if attn_mask is not None:
        scores = scores + attn_mask
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    return weights / total @ value, (highest + total.log()).squeeze(-1)


WRITTEN_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.scalar_tensor.default: _scalar_tensor,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
}
# int64 is captured for these results, because torch indexes with no other integers.
INDEX_SOURCES = frozenset({"topk", "argmax"})
# Casts, and operations that move numbers without computing any.
MOVES = frozenset(
    {
        *("to", "_to_copy", "int", "long", "squeeze", "unsqueeze", "getitem", "gather"),
        *("view", "select", "slice", "expand"),
    }
)
# Operations left after the decompositions above, by where they are lowered.
_DECOMPOSED_LATER = (  # llvm/torch-mlir, lib/Dialect/Torch/Transforms/DecomposeComplexOps.cpp
    *("_softmax.default", "_to_copy.default", "_unsafe_view.default"),
    *("alias.default", "arange.default", "clone.default", "copy.default", "floor_divide.default"),
    *("full.default", "masked_fill.Scalar", "mean.dim"),
    *("repeat.default", "select.int", "stack.default", "t.default"),
)
_LOWERED = (  # llvm/torch-mlir, lib/Conversion/TorchToStablehlo/
    *("add.Tensor", "bitwise_and.Tensor", "cat.default", "clamp.default"),
    *("cos.default", "div.Tensor", "eq.Tensor", "exp.default"),
    *("expand.default", "floor.default", "ge.Tensor", "gelu.default", "gt.Tensor"),
    *("le.Tensor", "logical_not.default", "lt.Scalar", "lt.Tensor"),
    *("maximum.default", "mul.Tensor", "native_layer_norm.default", "neg.default"),
    *("ones.default", "permute.default", "pow.Tensor_Scalar", "rsqrt.default", "rsub.Scalar"),
    *("sigmoid.default", "sin.default", "sub.Tensor", "transpose.int"),
    *("triu.default", "where.self"),
    *("index.Tensor", "index_select.default"),
    *("bmm.default", "convolution.default", "mm.default"),
    *("amax.default", "any.dim", "argmax.default", "sum.dim_IntList"),
    *("slice.Tensor", "squeeze.dim", "unsqueeze.default", "view.default"),
)
_LOWERED_BY_NEURON = (  # torch-neuronx: a custom call of its compiler, and its collectives' pass
    "aten.topk.default",
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.wait_tensor.default",
    "aten.copy_.default",  # a copy to an input, at the end, which becomes an alias
)
SUPPORTED = frozenset(
    (*(f"aten.{name}" for name in (*_DECOMPOSED_LATER, *_LOWERED)), *_LOWERED_BY_NEURON)
)
