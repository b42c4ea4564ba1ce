"""A code predictor with the activation outlier that was published for the real one.

There an activation reaches about 49,000 after the MLP of layer 2, counted from 0, normalisation's
dynamic range 597, and later layers cancel it (openvinotoolkit/openvino.genai, pull request 4187).
Random weights have none. Here it is made of few numbers, so that a rounding error of one of them
stays in the sum.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

OUTLIER = 49_000.0
LAYER = 2
CANCELLING = 8  # inner channels of the last layer's MLP


def outlier_layer(layers: int) -> int:
    """Return the layer whose MLP makes the outlier: an earlier one where the last would be it."""
    return min(LAYER, layers - 2)


def plant_outlier(weights: Mapping[str, Tensor], layers: int, seed: int = 0) -> None:
    """Change weights in place, so that channel 0 of the residual reaches OUTLIER.

    weights: of model.code_predictor.CodePredictor, by name, bfloat16; layers: 2 or more, with an
    MLP of twice the hidden size or more.

    It is the same for every row: RMSNorm makes the squares of a row's numbers add up to their
    count, and two inner channels of the MLP compute a square, since silu(z) z + silu(-z) (-z) is
    z * z. Channel 0 of the last layer's norm is then a constant, too, and CANCELLING inner channels
    of its MLP subtract the outlier. The norms between the two take the other channels, which the
    outlier makes small, back to their size.
    """
    draw = torch.Generator().manual_seed(seed)
    first, last = outlier_layer(layers), layers - 1
    ffn = "decoder.layers.{}.ffn.{}.weight"
    gate_up, down = (weights[ffn.format(first, name)] for name in ("gate_up", "down"))
    hidden, width = down.shape
    gate, up = gate_up[:width], gate_up[width:]
    norm = weights[f"decoder.layers.{first}.ffn_norm.weight"].float()
    sizes = (2 + 2 * torch.rand(hidden, generator=draw)) / norm
    for sign, start in ((1, 0), (-1, hidden)):
        square = torch.diag(sign * sizes)
        gate[start : start + hidden], up[start : start + hidden] = square, square
    # Each pair adds the square of its number, so that the sum is that of `squares`.
    squares = (torch.diagonal(gate[:hidden]).float() * norm).square()
    down[:, : 2 * hidden] = 0
    down[0, : 2 * hidden] = (OUTLIER / hidden / squares).repeat(2)
    reached = float((down[0, :hidden].double() * squares.double()).sum())

    boost = OUTLIER / hidden**0.5 / 2  # a residual of random weights has numbers of about 2
    for layer in range(first + 1, layers):
        for name in ("attention_norm", "ffn_norm"):
            later = weights[f"decoder.layers.{layer}.{name}.weight"]
            later *= boost
            later[0] = hidden**-0.5  # times the outlier's own norm, hidden ** 0.5
    gate_up, down = (weights[ffn.format(last, name)] for name in ("gate_up", "down"))
    constant = float(later[0].double()) * hidden**0.5
    places = torch.arange(CANCELLING) * (width // CANCELLING)
    for rows in (places, width + places):
        gate_up[rows] = 0
        gate_up[rows, 0] = (8 + 8 * torch.rand(CANCELLING, generator=draw)).to(gate_up.dtype)
    gates, ups = (gate_up[rows, 0].double() * constant for rows in (places, width + places))
    inner = torch.nn.functional.silu(gates) * ups
    shares = 0.5 + torch.rand(CANCELLING, generator=draw).double()
    down[:, places] = 0
    # Each rounds to bfloat16; the last ones subtract what is left of the others' rounding.
    for k in range(CANCELLING):
        part = float(shares[k] / shares[k:].sum()) * reached if k < CANCELLING - 2 else reached
        down[0, places[k]] = -part / float(inner[k])
        reached += float(down[0, places[k]].double() * inner[k])
