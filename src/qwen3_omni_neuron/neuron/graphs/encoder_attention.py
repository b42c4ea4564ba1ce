"""Attention of the encoders without large tensors of scores.

TorchNeuron gives an attention without a mask to a kernel that keeps its scores on the chip, if its
shapes suit it. Any other is computed by products: at 16,384 patches the scores of two heads would
be 1 GB a layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen3_omni_neuron.model.layers import widen

SCORES_BYTES = 64_000_000  # largest tensor of scores
HIDDEN = -3e4  # score of a hidden key, whose weight is then exactly 0, scaled or not
# Shapes that suit the kernel: the stricter one of two published rules, of TorchNeuron's table of
# decompositions and of measurements of a later version.
KERNEL_ROWS, KERNEL_HEAD_DIM, KERNEL_HEADS = 512, 128, 512
EVEN = 16  # head_dim of the kernel is padded to a multiple of it


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend to the keys that a mask shows, with a softmax in float32; see model.layers.Attend."""
    scale = q.shape[3] ** -0.5
    widened = _hiding(q, k, v, mask)
    if suits_kernel(widened[0]):
        mixed = F.scaled_dot_product_attention(*widened, scale=scale)
        return mixed[..., : q.shape[3]]
    frames, heads, rows, _ = q.shape
    at_once = max(1, SCORES_BYTES // (frames * heads * rows * 4))
    blocks = [
        _by_products(q[:, :, start : start + at_once], k, v, mask, scale)
        for start in range(0, rows, at_once)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def suits_kernel(q: Tensor) -> bool:
    """Return whether attention without a mask is a kernel. q: [frames, heads, rows, head_dim]."""
    frames, heads, rows, head_dim = q.shape
    is_small = head_dim <= KERNEL_HEAD_DIM and frames * heads <= KERNEL_HEADS
    return is_small and rows % KERNEL_ROWS == 0


def _hiding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Widen heads by a column that replaces the mask: 1 in q, and in k 0 or HIDDEN.

    A seen key gets the score q k + 1 * 0, which is q k exactly. The further columns are zeros. The
    kernel wants v as wide as k.
    """
    columns = EVEN - q.shape[3] % EVEN  # 72 -> 80, 64 -> 80
    hidden = torch.where(mask, 0.0, HIDDEN).to(k.dtype).transpose(2, 3)  # [frames or 1, 1, rows, 1]
    hidden = hidden.expand(*k.shape[:3], 1)
    one = F.pad(torch.ones_like(hidden), (0, columns - 1))
    return (
        torch.cat((q, one), 3),
        torch.cat((k, F.pad(hidden, (0, columns - 1))), 3),
        F.pad(v, (0, columns)),
    )


def _by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend with some of the queries."""
    scores = torch.where(mask, widen(q @ k.transpose(2, 3) * scale), HIDDEN)
    return torch.softmax(scores, 3).to(v.dtype) @ v
