"""Attention of the encoders' graphs: the kernel's rule, exactness, and sizes of scores."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qwen3_omni_neuron.compilation.plan import make_plan
from qwen3_omni_neuron.neuron.graphs import parts
from qwen3_omni_neuron.neuron.graphs.all import all_graphs, static_models
from qwen3_omni_neuron.neuron.graphs.graph import Graph
from qwen3_omni_neuron.neuron.graphs.layers import Alone
from qwen3_omni_neuron.neuron.graphs.parallel import parallelize
from qwen3_omni_neuron.neuron.graphs.parts import SCORES_BYTES, attend, suits_kernel
from qwen3_omni_neuron.neuron.target import TORCHNEURON
from testing.released import RELEASED

# [frames, heads, rows, head_dim]: through the kernel, in one piece, and in blocks of queries.
SHAPES = [(1, 2, 512, 72), (1, 3, 1024, 16), (2, 2, 104, 64), (1, 2, 520, 72), (1, 1, 37, 8)]


def case(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    seen = torch.tensor([shape[2] - 5, 1])[: shape[0], None]
    mask = torch.arange(shape[2]) < seen
    return [q, k, v, mask[:, None, None]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_attention_is_that_with_a_mask(shape, dtype, monkeypatch) -> None:
    """Whatever hidden keys and values hold, and also in blocks of queries."""
    q, k, v, mask = case(shape, dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(attend(q, k, v, mask), expected, atol=tolerance, rtol=tolerance)
    hidden = ~mask.transpose(2, 3)
    k, v = k.masked_fill(hidden, 100.0), v.masked_fill(hidden, 1e6)
    monkeypatch.setattr(parts, "SCORES_BYTES", 4 * shape[0] * shape[1] * shape[2] * 30)
    torch.testing.assert_close(attend(q, k, v, mask), expected, atol=tolerance, rtol=tolerance)


def test_no_mask_reaches_the_kernel(monkeypatch) -> None:
    """And q, k and v have one width, at most 128."""
    calls = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor, **options: float) -> Tensor:
        calls.append((q.shape, k.shape, v.shape, mask, sorted(options)))
        return v

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    attend(*case((1, 2, 512, 72), torch.bfloat16))
    assert calls == [((1, 2, 512, 80),) * 3 + ((), ["scale"])]


class Scores(TorchFunctionMode):
    """Size of the largest scores that a softmax takes, also inside of attention without a kernel.

    kernels: how many layers take the kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.kernels = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k, _, *mask = args
            if suits_kernel(q) and not mask:
                self.kernels += 1
                return torch.empty_like(q)
            self.largest = max(self.largest, q.nbytes // q.shape[3] * k.shape[2])
            return torch.empty_like(q)
        if func is torch.softmax:
            self.largest = max(self.largest, args[0].nbytes)
        return func(*args, **(kwargs or {}))


def test_a_bfloat16_softmax_is_in_float32() -> None:
    """Two windows of two heads, for which there is no kernel, have 104 x 104 scores each."""
    q, k, v, mask = case((2, 2, 104, 64), torch.bfloat16)
    with Scores() as scores:
        mixed = attend(q, k, v, mask)
    assert mixed.dtype == torch.bfloat16
    assert scores.largest == 2 * 2 * 104 * 104 * torch.float32.itemsize


def encoder_graphs(tp: int, **sizes: Any) -> Iterator[tuple[Graph, Any]]:
    plan = make_plan(Path(), RELEASED, TORCHNEURON.limits, dtype="bfloat16", tp=tp, **sizes)
    few = replace(
        RELEASED,
        thinker=replace(
            RELEASED.thinker,
            audio=replace(RELEASED.thinker.audio, layers=1),
            vision=replace(RELEASED.thinker.vision, layers=1, deepstack_layers=(0,)),
        ),
    )
    models = static_models(few)
    for part in ("audio_encoder", "vision_encoder"):
        parallelize(getattr(models, part), tp, Alone())
    for graph in all_graphs(few, plan):
        if graph.part in ("audio_encoder", "vision_encoder"):
            yield graph, getattr(models, graph.part)


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_scores_are_small_at_the_released_widths(tp) -> None:
    """Every bucket of the default plan is shown, and others that do not suit the kernel."""
    for patches in (None, (4000, 9220)):
        for graph, owner in encoder_graphs(tp, patch_buckets=patches):
            example = graph.example(device="meta")
            with torch.no_grad(), Scores() as scores:
                graph.module(owner)(*example)
            takes_kernel = graph.part == "vision_encoder" and graph.size("patches") % 512 == 0
            assert scores.kernels == takes_kernel, graph.label
            assert 0 < scores.largest + scores.kernels <= SCORES_BYTES, graph.label
