"""Mixture of experts: the router's top k, and the talker's shared expert with a sigmoid gate."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3_omni_neuron.model.config import MoeConfig
from qwen3_omni_neuron.model.layers import FeedForward, gated, widen

SCALE = "_scale"
"""Suffix of an int8 parameter's scale."""
EXPERT_MATRICES = ("gate_up", "down")


class MoeFeedForward(nn.Module):
    """Routed experts and, if configured, the gated shared expert.

    A loop over chosen experts depends on the data. So a graph of static shapes computes the same
    sum in one of two other ways, depending on its number of rows.

    If the config says int8, gate_up and down are int8, with a float32 scale per output,
    gate_up_scale [experts, 2 width] and down_scale [experts, hidden], which multiplies the product.
    Source: transformers Qwen3OmniMoeThinkerTextSparseMoeBlock and
    Qwen3OmniMoeTalkerTextSparseMoeBlock.
    """

    def __init__(self, hidden_size: int, c: MoeConfig):
        super().__init__()
        self.experts, self.experts_per_token = c.experts, c.experts_per_token
        self.round_inputs: dict[str, Callable[[Tensor], Tensor]] = {}  # see cpu.rounded_inputs
        self.normalize_weights, self.static = c.normalize_weights, c.static
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
        if not self.static:
            out = self._by_expert(x, weights, chosen)
        elif len(x) <= self.few_rows:
            out = self._by_chosen(x, weights, chosen)
        else:
            out = self._by_every_expert(x, weights, chosen)
        return out if self.shared is None else out + self.shared(x)

    @property
    def few_rows(self) -> int:
        """Most rows for which a graph of static shapes gathers the chosen experts.

        Gathered experts are read, written and read again; otherwise all are read once.
        """
        return (self.experts - 1) // (3 * self.experts_per_token)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose k experts per row: weights [rows, k] in x's dtype, indices int64 [rows, k].

        The softmax is in float32.
        """
        probabilities = torch.softmax(widen(self.router(x)), -1)
        weights, chosen = probabilities.topk(self.experts_per_token)
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def _by_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            gate_up, down = self.gate_up[expert].to(x.dtype), self.down[expert].to(x.dtype)
            taken = self._rounded(x[rows], "gate_up")
            hidden = gated(self._scaled(F.linear(taken, gate_up), "gate_up", expert))
            taken = self._rounded(hidden, "down")
            given = self._scaled(F.linear(taken, down), "down", expert)
            out.index_add_(0, rows, given * weights[rows, rank, None])
        return out

    def _rounded(self, x: Tensor, name: str) -> Tensor:
        return self.round_inputs[name](x) if name in self.round_inputs else x

    def matrices(self, name: str) -> Tensor:
        """Return all experts' matrices, [experts, in, out]. name: one of EXPERT_MATRICES."""
        matrices: Tensor = getattr(self, name)
        return matrices.transpose(1, 2)

    def _by_chosen(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows, k = chosen.shape
        experts = chosen.int().flatten()
        copies = x.unsqueeze(1).expand(-1, k, -1).flatten(0, 1).unsqueeze(1)
        gate_up = self.matrices("gate_up").index_select(0, experts).to(x.dtype)
        product = self._scaled(torch.bmm(copies, gate_up).squeeze(1), "gate_up", experts)
        hidden = gated(product) * weights.flatten().unsqueeze(1)  # [rows k, width]
        down = self.matrices("down").index_select(0, experts).to(x.dtype)
        product = torch.bmm(hidden.unsqueeze(1), down).squeeze(1)
        return self._scaled(product, "down", experts).unflatten(0, (rows, k)).sum(1)

    def _by_every_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Apply every expert to every row, with weight 0 unless chosen.

        At released sizes up to about 200 rows' products take no longer than reading the experts.
        """
        gate_up, down = self.matrices("gate_up").to(x.dtype), self.matrices("down").to(x.dtype)
        # Not by @, which may transpose the matrices and the result.
        product = torch.bmm(x.expand(self.experts, -1, -1), gate_up)
        hidden = gated(self._scaled(product, "gate_up"))  # [experts, rows, width]
        # By comparison: a scatter would write the weights one by one.
        experts = torch.arange(self.experts, dtype=torch.int32, device=x.device)
        taken = chosen.unsqueeze(2).int() == experts  # [rows, k, experts]
        by_expert = torch.where(taken, weights.unsqueeze(2), 0).sum(1)
        hidden = hidden * by_expert.t().unsqueeze(2)
        if self.int8:  # each expert's outputs have their own scale
            return self._scaled(torch.bmm(hidden, down), "down").sum(0)
        # One product, which also sums over experts: [rows, experts width] @ [.., hidden].
        return hidden.transpose(0, 1).flatten(1) @ down.flatten(0, 1)

    def _scaled(self, product: Tensor, name: str, experts: Tensor | int | None = None) -> Tensor:
        """Multiply a product with int8 matrices by their scales, if any, in float32.

        product: [n, out] or [n, rows, out] with the n matrices of `experts`, None for all; [rows,
        out] with one expert's. Returns the same shape and type.
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
    """Feed-forward for every row, scaled by sigmoid(gate(x))."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.ffn = FeedForward(hidden_size, width)
        self.gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [rows, hidden] to the same shape."""
        return torch.sigmoid(self.gate(x)) * self.ffn(x)
