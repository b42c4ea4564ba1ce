"""Mixture of experts: the router's top k, and the talker's shared expert with a sigmoid gate."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import MoeConfig
from qwen3_omni_neuron.model.layers import FeedForward, gated, widen

FEW_ROWS = 16  # up to here a matrix product takes as long as reading the matrix
SCALE = "_scale"
"""Ending of the name of an int8 parameter's scale."""


class MoeFeedForward(nn.Module):
    """Routed experts plus, where the config has one, the gated shared expert.

    A loop over the chosen experts depends on data. A graph of static shapes (block_rows above 0)
    computes the same sum in one of three other ways, by its number of rows.

    Where the config says int8, gate_up and down are int8, and have a float32 scale for each output,
    gate_up_scale [experts, 2 width] and down_scale [experts, hidden]. A product takes the numbers
    in the type of its inputs, which holds them exactly, and is multiplied by the scale: the matrix
    is read at a byte a number, and no rounded weight is ever made.
    Source: transformers Qwen3OmniMoeThinkerTextSparseMoeBlock and
    Qwen3OmniMoeTalkerTextSparseMoeBlock.
    """

    def __init__(self, hidden_size: int, c: MoeConfig):
        super().__init__()
        self.experts, self.experts_per_token = c.experts, c.experts_per_token
        self.normalize_weights, self.block_rows = c.normalize_weights, c.block_rows
        self.router = nn.Linear(hidden_size, c.experts, bias=False)
        gate_up = torch.empty(c.experts, 2 * c.expert_width, hidden_size)
        down = torch.empty(c.experts, hidden_size, c.expert_width)
        self.int8 = c.int8
        if c.int8:
            self.gate_up = nn.Parameter(gate_up.to(torch.int8), requires_grad=False)
            self.down = nn.Parameter(down.to(torch.int8), requires_grad=False)
            self.gate_up_scale = nn.Parameter(torch.empty(gate_up.shape[:-1]))
            self.down_scale = nn.Parameter(torch.empty(down.shape[:-1]))
        else:
            self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)
        self.shared: SharedExpert | None = None
        if c.shared_expert_width:
            self.shared = SharedExpert(hidden_size, c.shared_expert_width)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [rows, hidden] to the same shape."""
        weights, chosen = self.route(x)
        if not self.block_rows:
            out = self._by_expert(x, weights, chosen)
        elif len(x) == 1:
            out = self._one_row(x, weights, chosen[0])
        elif len(x) <= FEW_ROWS:
            out = self._by_every_expert(x, weights, chosen)
        else:
            out = self._by_block(x, weights, chosen)
        return out if self.shared is None else out + self.shared(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose k experts a row: weights [rows, k] in x's dtype, and indices int64 [rows, k].

        The softmax is in float32.
        """
        probabilities = torch.softmax(widen(self.router(x)), -1)
        weights, chosen = probabilities.topk(self.experts_per_token)
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def _by_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Apply each chosen expert once, to all rows that chose it."""
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            gate_up, down = self.gate_up[expert].to(x.dtype), self.down[expert].to(x.dtype)
            hidden = gated(self._scaled(F.linear(x[rows], gate_up), "gate_up", expert))
            given = self._scaled(F.linear(hidden, down), "down", expert)
            out.index_add_(0, rows, given * weights[rows, rank, None])
        return out

    def _one_row(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Apply the chosen experts to one row."""
        gate_up = self.gate_up.index_select(0, chosen).to(x.dtype)  # [k, 2 width, hidden]
        product = self._scaled((gate_up @ x.t()).squeeze(2), "gate_up", chosen)
        hidden = gated(product) * weights.t()  # [k, width]
        down = self.down.index_select(0, chosen).to(x.dtype)  # [k, hidden, width]
        product = torch.bmm(down, hidden.unsqueeze(2))
        return self._scaled(product.squeeze(2), "down", chosen).sum(0, keepdim=True)

    def _by_every_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Apply every expert to every row, with weight 0 where it was not chosen.

        It serves a decode step of several slots: a product with a few rows takes little longer than
        with one row, because reading the matrix takes most of the time.
        """
        gate_up, down = self.gate_up.to(x.dtype), self.down.to(x.dtype)
        product = self._scaled(x @ gate_up.transpose(1, 2), "gate_up")
        hidden = gated(product)  # [experts, rows, width]
        by_expert = x.new_zeros(len(x), self.experts).scatter(1, chosen, weights)
        hidden = hidden * by_expert.t().unsqueeze(2)
        return self._scaled(torch.bmm(hidden, down.transpose(1, 2)), "down").sum(0)

    def _by_block(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Apply the experts to padded blocks of rows, one expert a block: many rows, static shapes.

        With blocks of 4, experts that 5, 0 and 3 rows chose get 2, 0 and 1 blocks. The number of
        blocks has an upper bound; the expert of each block is data. Counts are taken in float32
        (exact up to 2**24) by matrix products: Neuron has neither a running sum nor a product of
        integers. Integers here are int32, except indices from top-k or for index_copy.
        """
        (rows, k), size = chosen.shape, self.block_rows
        numbers = torch.arange(self.experts, dtype=torch.int32, device=x.device)
        taken = (chosen.unsqueeze(2).int() == numbers).any(1).float()  # [rows, experts]
        before = torch.ones(rows, rows, device=x.device).tril(-1)
        earlier = torch.mm(before, taken)  # how many earlier rows chose the expert too
        used = torch.ceil(taken.sum(0) / size)  # blocks of each expert
        ends = torch.mv(torch.ones(self.experts, self.experts, device=x.device).tril(), used)
        place = ((ends - used) * size + earlier).gather(1, chosen).flatten().long()
        # A chosen expert's padding is at most size - 1 rows.
        blocks = (rows * k + min(rows * k, self.experts) * (size - 1)) // size
        block = torch.arange(blocks, dtype=ends.dtype, device=x.device)
        expert = (block[:, None] >= ends).sum(1, dtype=torch.int32)
        expert = expert.clamp(max=self.experts - 1)  # unused blocks
        copies = x.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)
        inputs = x.new_zeros(blocks * size, x.shape[1]).index_copy(0, place, copies)
        gate_up = self.gate_up.index_select(0, expert).to(x.dtype)  # [blocks, 2 width, hidden]
        product = torch.bmm(inputs.unflatten(0, (blocks, size)), gate_up.transpose(1, 2))
        hidden = gated(self._scaled(product, "gate_up", expert))
        down = self.down.index_select(0, expert).to(x.dtype)  # [blocks, hidden, width]
        out = self._scaled(torch.bmm(hidden, down.transpose(1, 2)), "down", expert).flatten(0, 1)
        out = out.index_select(0, place).unflatten(0, (rows, k))
        return (out * weights.unsqueeze(2)).sum(1)

    def _scaled(self, product: Tensor, name: str, experts: Tensor | int | None = None) -> Tensor:
        """Multiply a product with int8 matrices by their scales, in float32.

        product: [n, out] or [n, rows, out] with the n matrices of `experts`, None for all of them;
        [rows, out] with those of one expert. Returns the same shape and type; without scales, the
        product as it is.
        """
        if not self.int8:
            return product
        scale: Tensor = getattr(self, name + SCALE)
        if isinstance(experts, int):
            scale = scale[experts]
        elif experts is not None:
            scale = scale.index_select(0, experts)
        if product.ndim > scale.ndim:
            scale = scale.unsqueeze(-2)
        return (widen(product) * scale).to(product.dtype)


class SharedExpert(nn.Module):
    """Feed-forward that every row takes, scaled by sigmoid(gate(x))."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.ffn = FeedForward(hidden_size, width)
        self.gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [rows, hidden] to the same shape."""
        return torch.sigmoid(self.gate(x)) * self.ffn(x)
