"""Mixture of experts: the router's top k, and the talker's shared expert behind a sigmoid gate."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.config import MoeConfig
from qwen3_omni_neuron.model.feed_forward import FeedForward, gated
from qwen3_omni_neuron.model.linear import Linear
from qwen3_omni_neuron.model.norm import cast, widen

FEW_ROWS = 16  # up to here a matrix costs what reading it costs


class MoeFeedForward(nn.Module):
    """Routed experts plus, where the config has one, the gated shared expert.

    Source: transformers Qwen3OmniMoeThinkerTextSparseMoeBlock and
    Qwen3OmniMoeTalkerTextSparseMoeBlock.
    """

    def __init__(self, hidden_size: int, c: MoeConfig):
        super().__init__()
        self.experts, self.experts_per_token = c.experts, c.experts_per_token
        self.normalize_weights = c.normalize_weights
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
        mixed = residual.clone()
        for expert in chosen.unique().tolist():
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            hidden = gated(F.linear(x[rows], self.gate_up[expert]))
            out = torch.mm(hidden, self.down[expert])
            mixed.index_add_(0, rows, out * weights[rows, rank].unsqueeze(1))
        return mixed


class SharedExpert(nn.Module):
    """A feed-forward that every row passes, scaled by sigmoid(gate(x))."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.ffn = FeedForward(hidden_size, width)
        self.gate = Linear(hidden_size, 1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + sigmoid(gate(x)) * ffn(x)."""
        return torch.addcmul(residual, torch.sigmoid(self.gate(x)), self.ffn(x))
