"""Mixture of experts: the router's top k, and the talker's shared expert with a sigmoid gate."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import MoeConfig
from qwen3_omni_neuron.model.layers import FeedForward, Linear, cast, gated, widen

FEW_ROWS = 16  # up to here a matrix product takes as long as reading the matrix


class MoeFeedForward(nn.Module):
    """Routed experts plus, where the config has one, the gated shared expert.

    Source: transformers Qwen3OmniMoeThinkerTextSparseMoeBlock and
    Qwen3OmniMoeTalkerTextSparseMoeBlock.
    """

    def __init__(self, hidden_size: int, c: MoeConfig):
        super().__init__()
        self.experts, self.experts_per_token = c.experts, c.experts_per_token
        self.normalize_weights, self.block_rows = c.normalize_weights, c.block_rows
        self.router = Linear(hidden_size, c.experts)
        self.gate_up = nn.Parameter(torch.empty(c.experts, 2 * c.expert_width, hidden_size))
        # [experts, width, hidden]: the chosen experts' matrices, stacked, are one matrix.
        self.down = nn.Parameter(torch.empty(c.experts, c.expert_width, hidden_size))
        self.shared: SharedExpert | None = None
        if c.shared_expert_width:
            self.shared = SharedExpert(hidden_size, c.shared_expert_width)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + experts(x), both [rows, hidden]."""
        if self.shared is not None:
            residual = self.shared.add_to(residual, x)
        weights, chosen = self.route(x)
        rows = int(x.shape[0])
        if rows == 1:
            return self._one_row(residual, x, weights, chosen[0])
        if rows <= FEW_ROWS:
            return self._by_every_expert(residual, x, weights, chosen)
        if self.block_rows:
            return self._by_block(residual, x, weights, chosen)
        return self._by_expert(residual, x, weights, chosen)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose k experts a row: weights [rows, k] in x's dtype, and indices int64 [rows, k].

        The softmax is in float32.
        """
        logits = widen(self.router(x))
        if self.normalize_weights:
            # The softmax over all, cut to its top k and normalised, is the softmax over the top k.
            values, chosen = logits.topk(self.experts_per_token)
            weights = torch.softmax(values, -1)
        else:
            weights, chosen = torch.softmax(logits, -1).topk(self.experts_per_token)
        return cast(weights, x.dtype), chosen

    def _one_row(self, residual: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Apply the experts to one row: side by side, the chosen are one wider feed-forward."""
        gate_up = self.gate_up.index_select(0, chosen)  # [k, 2 width, hidden]
        hidden = torch.mm(gate_up.flatten(0, 1), x.t()).view(gate_up.shape[:2])
        hidden = gated(hidden) * weights.t()  # [k, width]
        down = self.down.index_select(0, chosen).flatten(0, 1)  # [k * width, hidden]
        return torch.addmm(residual, hidden.view(1, -1), down)

    def _by_every_expert(
        self, residual: Tensor, x: Tensor, weights: Tensor, chosen: Tensor
    ) -> Tensor:
        """Apply every expert to every row, with weight 0 where it was not chosen.

        For a decode step of several slots. The operations are the same whichever experts are
        chosen, so a graph can hold them, and a product with a few rows takes little longer than
        with one: reading the matrix is what takes time.
        """
        hidden = torch.matmul(x, self.gate_up.transpose(1, 2))  # [experts, rows, 2 width]
        by_expert = torch.zeros_like(x[:, :1]).repeat(1, self.experts)
        by_expert = by_expert.scatter(1, chosen, weights)  # [rows, experts]
        hidden = gated(hidden) * by_expert.t().unsqueeze(2)
        # [experts, rows, width] -> [rows, experts * width]: all experts are one wide feed-forward
        hidden = hidden.transpose(0, 1).flatten(1)
        return torch.addmm(residual, hidden, self.down.flatten(0, 1))

    def _by_expert(self, residual: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Apply each chosen expert once, to all rows that chose it: for many rows."""
        by_expert = chosen.flatten().argsort(stable=True)  # (row, rank) pairs, expert by expert
        rows = by_expert // self.experts_per_token
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        out = run_experts(x[rows], counts, self.gate_up, self.down)
        out = out * weights.flatten()[by_expert].unsqueeze(1)
        return residual.index_add(0, rows, out)

    def _by_block(self, residual: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Apply the experts to blocks of rows of one expert, padded: for many rows, static shapes.

        With blocks of 4, experts that 5, 0 and 3 rows chose get 2, 0 and 1 blocks. Their number has
        an upper bound, and which expert a block belongs to is data. Counts are taken in float32
        (exact up to 2**24) by matrix products: Neuron has neither a running sum nor a product of
        integers.
        """
        (rows, k), size = chosen.shape, self.block_rows
        numbers = torch.arange(self.experts, device=x.device)
        taken = (chosen.unsqueeze(2) == numbers).any(1).float()  # [rows, experts]
        before = torch.ones(rows, rows, device=x.device).tril(-1)
        earlier = torch.mm(before, taken)  # how many earlier rows chose the expert too
        used = torch.ceil(taken.sum(0) / size)  # blocks of each expert
        ends = torch.mv(torch.ones(self.experts, self.experts, device=x.device).tril(), used)
        place = ((ends - used) * size + earlier).gather(1, chosen).flatten().long()
        # A chosen expert's padding is at most size - 1 rows.
        blocks = (rows * k + min(rows * k, self.experts) * (size - 1)) // size
        expert = (torch.arange(blocks, device=x.device)[:, None] >= ends).sum(1)
        expert = expert.clamp(max=self.experts - 1)  # unused blocks
        copies = x.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)
        inputs = x.new_zeros(blocks * size, x.shape[1]).index_copy(0, place, copies)
        gate_up = self.gate_up.index_select(0, expert)  # [blocks, 2 width, hidden]
        hidden = gated(torch.bmm(inputs.unflatten(0, (blocks, size)), gate_up.transpose(1, 2)))
        out = torch.bmm(hidden, self.down.index_select(0, expert)).flatten(0, 1)
        out = out.index_select(0, place).unflatten(0, (rows, k))
        return residual + (out * weights.unsqueeze(2)).sum(1)


def _scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        # PyTorch recommends torch.compile instead, which takes a minute to start.
        warnings.simplefilter("ignore", category=DeprecationWarning)
        return torch.jit.script(function)


@_scripted
def run_experts(x: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Apply expert e to the next counts[e] rows of x; [rows, hidden] in and out.

    Scripted, because a traced graph can't hold a loop that depends on data, but can call a script.
    """
    outs = [x[:0]]
    start = 0
    for expert in range(gate_up.shape[0]):
        count = int(counts[expert])
        if count > 0:
            hidden = torch.mm(x[start : start + count], gate_up[expert].t())
            outs.append(torch.mm(gated(hidden), down[expert]))
            start += count
    return torch.cat(outs)


class SharedExpert(nn.Module):
    """Feed-forward that every row takes, scaled by sigmoid(gate(x))."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.ffn = FeedForward(hidden_size, width)
        self.gate = Linear(hidden_size, 1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + sigmoid(gate(x)) * ffn(x), both [rows, hidden]."""
        return torch.addcmul(residual, torch.sigmoid(self.gate(x)), self.ffn(x))
