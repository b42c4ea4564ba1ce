"""Mixture of experts: the router's top k, and the talker's shared expert behind a sigmoid gate."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.config import MoeConfig
from qwen3_omni_neuron.model.feed_forward import FeedForward, gated
from qwen3_omni_neuron.model.linear import Linear

# Up to this many (row, expert) pairs the experts' matrices are gathered pair by pair, which is
# what one decode step wants; beyond, each expert runs once over all of its rows.
GATHER_PAIRS = 16


class MoeFeedForward(nn.Module):
    """Routed experts plus, where the config has one, the gated shared expert.

    Source: transformers Qwen3OmniMoeThinkerTextSparseMoeBlock and
    Qwen3OmniMoeTalkerTextSparseMoeBlock.
    """

    def __init__(self, hidden_size: int, c: MoeConfig):
        super().__init__()
        self.experts_per_token = c.experts_per_token
        self.normalize_weights = c.normalize_weights
        self.router = Linear(hidden_size, c.experts)
        self.gate_up = nn.Parameter(torch.empty(c.experts, 2 * c.expert_width, hidden_size))
        self.down = nn.Parameter(torch.empty(c.experts, hidden_size, c.expert_width))
        self.shared: SharedExpert | None = None
        if c.shared_expert_width:
            self.shared = SharedExpert(hidden_size, c.shared_expert_width)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + experts(x), both [rows, hidden]."""
        if self.shared is not None:
            residual = self.shared.add_to(residual, x)
        weights, chosen = self.route(x)
        if int(chosen.numel()) <= GATHER_PAIRS:
            return residual + self._gathered(x, weights, chosen)
        return residual + self._by_expert(x, weights, chosen)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [rows, k] in x's dtype, from a float32 softmax, and experts int64 [rows, k]."""
        probabilities = torch.softmax(self.router(x), -1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.experts_per_token)
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def _gathered(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows, k = chosen.shape
        pairs = chosen.reshape(-1)
        column = x.repeat_interleave(k, 0).unsqueeze(2)  # [pairs, hidden, 1]
        hidden = torch.bmm(self.gate_up.index_select(0, pairs), column).squeeze(2)
        out = torch.bmm(self.down.index_select(0, pairs), gated(hidden).unsqueeze(2))
        return torch.bmm(weights.unsqueeze(1), out.view(rows, k, -1)).squeeze(1)

    def _by_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mixed = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            hidden = gated(F.linear(x[rows], self.gate_up[expert]))
            out = F.linear(hidden, self.down[expert])
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
