"""Mixture of experts: the router's top k, and the talker's shared expert behind a sigmoid gate."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import MoeConfig
from qwen3_omni_neuron.model.layers import FeedForward, Linear, cast, gated, widen

FEW_ROWS = 16  # up to here a matrix costs what reading it costs


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
        # [experts, width, hidden]: the chosen ones' matrices, one above the other, are one matrix.
        self.down = nn.Parameter(torch.empty(c.experts, c.expert_width, hidden_size))
        self.shared: SharedExpert | None = None
        if c.shared_expert_width:
            self.shared = SharedExpert(hidden_size, c.shared_expert_width)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + experts(x), both [rows, hidden]."""
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
        """Weights [rows, k] in x's dtype, from a float32 softmax, and experts int64 [rows, k]."""
        logits = widen(self.router(x))
        if self.normalize_weights:
            # The softmax over all, cut to its top k and normalised, is the softmax over the top k.
            values, chosen = logits.topk(self.experts_per_token)
            weights = torch.softmax(values, -1)
        else:
            weights, chosen = torch.softmax(logits, -1).topk(self.experts_per_token)
        return cast(weights, x.dtype), chosen

    def _one_row(self, residual: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """A decode step: the chosen experts, side by side, are one wider feed-forward."""
        gate_up = self.gate_up.index_select(0, chosen)  # [k, 2 width, hidden]
        hidden = torch.mm(gate_up.flatten(0, 1), x.t()).view(gate_up.shape[:2])
        hidden = gated(hidden) * weights.t()  # [k, width]
        down = self.down.index_select(0, chosen).flatten(0, 1)  # [k * width, hidden]
        return torch.addmm(residual, hidden.view(1, -1), down)

    def _by_every_expert(
        self, residual: Tensor, x: Tensor, weights: Tensor, chosen: Tensor
    ) -> Tensor:
        """A decode step of several slots: every expert sees every row, and counts where chosen.

        The same operations whichever experts are chosen, so a graph can hold them; and a few rows
        cost a matrix little more than one does: reading it is what takes time.
        """
        hidden = torch.matmul(x, self.gate_up.transpose(1, 2))  # [experts, rows, 2 width]
        by_expert = torch.zeros_like(x[:, :1]).repeat(1, self.experts)
        by_expert = by_expert.scatter(1, chosen, weights)  # [rows, experts]
        hidden = gated(hidden) * by_expert.t().unsqueeze(2)
        # [experts, rows, width] -> [rows, experts * width]: all experts are one wide feed-forward
        hidden = hidden.transpose(0, 1).flatten(1)
        return torch.addmm(residual, hidden, self.down.flatten(0, 1))

    def _by_expert(self, residual: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Many rows: each expert that any of them chose runs once, over all that chose it."""
        by_expert = chosen.flatten().argsort(stable=True)  # (row, rank) pairs, expert by expert
        rows = by_expert // self.experts_per_token
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        out = run_experts(x[rows], counts, self.gate_up, self.down)
        out = out * weights.flatten()[by_expert].unsqueeze(1)
        return residual.index_add(0, rows, out)

    def _by_block(self, residual: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Many rows in fixed shapes: the rows of each expert, padded to whole blocks.

        With blocks of 4, experts that 5, 0 and 3 rows chose get 2, 0 and 1 of them. How many
        there are in all has a bound, and which expert each belongs to is data. Counts are taken in
        float32 (exact up to 2**24) by matrix products: Neuron has neither a running sum nor a
        product of integers.
        """
        (rows, k), size = chosen.shape, self.block_rows
        numbers = torch.arange(self.experts, device=x.device)
        taken = (chosen.unsqueeze(2) == numbers).any(1).float()  # [rows, experts]
        before = torch.ones(rows, rows, device=x.device).tril(-1)
        earlier = torch.mm(before, taken)  # how many rows above chose the expert too
        used = torch.ceil(taken.sum(0) / size)  # blocks of each expert
        ends = torch.mv(torch.ones(self.experts, self.experts, device=x.device).tril(), used)
        place = ((ends - used) * size + earlier).gather(1, chosen).flatten().long()
        # Each expert that is chosen wastes at most one row less than a block.
        blocks = (rows * k + min(rows * k, self.experts) * (size - 1)) // size
        expert = (torch.arange(blocks, device=x.device)[:, None] >= ends).sum(1)
        expert = expert.clamp(max=self.experts - 1)  # blocks that are over
        copies = x.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)
        inputs = x.new_zeros(blocks * size, x.shape[1]).index_copy(0, place, copies)
        gate_up = self.gate_up.index_select(0, expert)  # [blocks, 2 width, hidden]
        hidden = gated(torch.bmm(inputs.unflatten(0, (blocks, size)), gate_up.transpose(1, 2)))
        out = torch.bmm(hidden, self.down.index_select(0, expert)).flatten(0, 1)
        out = out.index_select(0, place).unflatten(0, (rows, k))
        return residual + (out * weights.unsqueeze(2)).sum(1)


def _scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        # PyTorch points to torch.compile, whose start takes a minute: see cpu.graph.
        warnings.simplefilter("ignore", category=DeprecationWarning)
        return torch.jit.script(function)


@_scripted
def run_experts(x: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Expert e over the next counts[e] rows of x, [rows, hidden] each way.

    A loop over what the data says is the one thing that a traced graph can't hold: hence a script
    of its own, which both a graph and Python call.
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
    """A feed-forward that every row passes, scaled by sigmoid(gate(x))."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.ffn = FeedForward(hidden_size, width)
        self.gate = Linear(hidden_size, 1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + sigmoid(gate(x)) * ffn(x)."""
        return torch.addcmul(residual, torch.sigmoid(self.gate(x)), self.ffn(x))
