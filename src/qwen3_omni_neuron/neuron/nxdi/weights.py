"""A decoder's weights in NxDI's layout, read straight from the checkpoint.

NxDI wants q, k and v apart, as they are stored, and experts in one stack with the matrices
transposed. The released names stay in `weights`: what it says of our parameters is rearranged here.

    ours                      NxDI's
    embedding, *_embedding    embed_tokens
    head, *_head              lm_head
    attention.qkv             self_attn.{q,k,v}_proj
    attention.out             self_attn.o_proj
    attention.qk_norm         self_attn.{q,k}_layernorm
    attention_norm            input_layernorm
    ffn_norm                  post_attention_layernorm
    ffn.router                mlp.router.linear_router
    ffn.gate_up               mlp.expert_mlps.mlp_op.gate_up_proj  [experts, hidden, 2 width]
    ffn.down                  mlp.expert_mlps.mlp_op.down_proj     [experts, width, hidden]
    ffn.shared.ffn.gate_up    mlp.shared_experts.{gate,up}_proj
    ffn.shared.ffn.down       mlp.shared_experts.down_proj
    ffn.shared.gate           mlp.shared_experts.gate
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.names import Piece, Pieces
from qwen3_omni_neuron.checkpoint.parameters import compare_names, copy_piece
from qwen3_omni_neuron.model.config import DecoderConfig

State = dict[str, Tensor]

# A parameter of ours that has one of NxDI's for each of its pieces, in this order.
_SPLIT = {
    "embedding.weight": ("embed_tokens.weight",),
    "codec_embedding.weight": ("embed_tokens.weight",),
    "head.weight": ("lm_head.weight",),
    "codec_head.weight": ("lm_head.weight",),
    "norm.weight": ("norm.weight",),
    "attention.qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "attention.out.weight": ("self_attn.o_proj.weight",),
    "attention.qk_norm.weight": tuple(f"self_attn.{name}_layernorm.weight" for name in "qk"),
    "attention_norm.weight": ("input_layernorm.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "ffn.router.weight": ("mlp.router.linear_router.weight",),
    "ffn.shared.ffn.gate_up.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "ffn.shared.ffn.down.weight": ("mlp.shared_experts.down_proj.weight",),
    "ffn.shared.gate.weight": ("mlp.shared_experts.gate.weight",),
}
_STACKS = {
    "ffn.gate_up": "mlp.expert_mlps.mlp_op.gate_up_proj.weight",
    "ffn.down": "mlp.expert_mlps.mlp_op.down_proj.weight",
}
_LAYER = re.compile(r"decoder\.(layers\.\d+\.)?")


def nxdi_pieces(ours: Iterable[tuple[str, list[Piece]]]) -> Pieces:
    """The parameters of NxDI's decoder and what fills them, from those of ours (see weights).

    A parameter with one piece and no region is the stored tensor itself.
    """
    for target, pieces in ours:
        match = _LAYER.match(target)
        prefix, name = "", target
        if match is not None:
            prefix, name = match[1] or "", target[match.end() :]
        if name in _STACKS:
            yield prefix + _STACKS[name], [_transposed(piece) for piece in pieces]
            continue
        for theirs, piece in zip(_SPLIT[name], pieces, strict=True):
            yield prefix + theirs, [Piece(piece.name)]


def _transposed(piece: Piece) -> Piece:
    """A region of [experts, width, hidden], or of [experts, 2 width, hidden], as the same of
    [experts, hidden, ...]; ours of the former is transposed already."""
    if piece.convert is not None:
        return piece
    expert, columns = piece.region
    return Piece(piece.name, (expert, slice(None), columns), torch.t)


def stack_shape(name: str, c: DecoderConfig) -> tuple[int, int, int]:
    """Of a parameter of NxDI's that is a stack of experts."""
    assert c.moe is not None
    if name.endswith(_STACKS["ffn.gate_up"]):
        return c.moe.experts, c.hidden_size, 2 * c.moe.expert_width
    return c.moe.experts, c.moe.expert_width, c.hidden_size


def nxdi_state(
    pieces: Iterable[tuple[str, list[Piece]]],
    c: DecoderConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
) -> State:
    """Read a decoder's weights, whole, by NxDI's names. Only what `pieces` names is read.

    Raises CheckpointError where a tensor is missing, or an expert's has another shape than the
    config says.
    """
    pieces = list(pieces)
    compare_names(
        {part.name for _, parts in pieces for part in parts}, set(), set(checkpoint.names)
    )
    state: State = {}
    with checkpoint.reader() as reader:
        for target, parts in pieces:
            if not parts[0].region:
                state[target] = reader.tensor(parts[0].name).to(dtype)
                continue
            stack = torch.empty(stack_shape(target, c), dtype=dtype)
            for part in parts:
                copy_piece(stack, part, reader.tensor(part.name))
            state[target] = stack
    return state


def ranks_of(layers: int) -> list[str]:
    """The names under which a core's number is held among the weights: the model's, and for every
    layer that of the attention and that of the experts."""
    names = ["rank_util.rank"]
    for layer in range(layers):
        names.append(f"layers.{layer}.self_attn.rank_util.rank")
        names.append(f"layers.{layer}.mlp.expert_mlps.spmd_rank.rank")
    return names


def rank_state(layers: int, tp: int) -> State:
    """What tells each core its rank, which NxDI keeps among the weights."""
    ranks = torch.arange(tp, dtype=torch.int32)
    return {name: ranks.clone() for name in ranks_of(layers)}
