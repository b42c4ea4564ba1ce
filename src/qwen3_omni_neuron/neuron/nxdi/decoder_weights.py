"""A decoder's weights as NxDI loads them: one file per core, written parameter by parameter.

NxDI would keep the whole checkpoint in memory. The files equal its get_sharded_checkpoint's: q, k
and v separate, experts as one stack of transposed matrices, in int8 with scales of outputs. Heads,
widths, vocabulary and the embedding's hidden size are sharded; routers and norms replicated.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.drawn import DrawnTensors
from qwen3_omni_neuron.checkpoint.files import Checkpoint, ShardReader
from qwen3_omni_neuron.checkpoint.names import Piece, Pieces, talker_pieces, thinker_pieces
from qwen3_omni_neuron.checkpoint.numbers import quantise
from qwen3_omni_neuron.checkpoint.parameters import compare_names, copy_piece
from qwen3_omni_neuron.checkpoint.tensor_file import Layout, layout_bytes, write_tensor_files
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.neuron.graphs.cut import (
    Cut,
    cut_heads,
    cut_width,
    key_heads,
    query_heads,
    shard,
)
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec
from qwen3_omni_neuron.neuron.part import WEIGHTS_FOLDER, rank_file

Reader = ShardReader | DrawnTensors

# Our parameters, and NxDI's for each of their stored tensors, in order.
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
_GATE_UP = "mlp.expert_mlps.mlp_op.gate_up_proj.weight"
_DOWN = "mlp.expert_mlps.mlp_op.down_proj.weight"
_SCALES = {name: name.removesuffix("weight") + "scale" for name in (_GATE_UP, _DOWN)}
_STACKS = {"ffn.gate_up": _GATE_UP, "ffn.down": _DOWN}
_OUR_LAYER = re.compile(r"decoder\.(layers\.\d+\.)?")
_LAYER = re.compile(r"layers\.\d+\.")
_PROJECTION = re.compile(r"self_attn\.([qkvo])_proj\.weight")


def write_decoder_shards(spec: DecoderSpec, checkpoint: Checkpoint, folder: Path) -> None:
    """Write every core's weights, one parameter or expert in memory at a time.

    Raises CheckpointError, OptionError, OSError.
    """
    pieces = _cut_pieces(spec)
    compare_names(
        {part.name for _, parts in pieces for part in parts}, set(), set(checkpoint.names)
    )
    layout, tp = _layout(spec), spec.tp

    def shards() -> Iterator[tuple[str, Sequence[Tensor]]]:
        yield from _cut_parameters(pieces, checkpoint, spec)
        for name in rank_names(spec.decoder.layers):
            yield name, list(torch.arange(tp, dtype=torch.int32).split(1))

    (folder / WEIGHTS_FOLDER).mkdir()
    write_tensor_files([folder / rank_file(rank) for rank in range(tp)], layout, shards())


def decoder_shard_bytes(spec: DecoderSpec) -> int:
    """Return the bytes of all cores' files."""
    return spec.tp * layout_bytes(_layout(spec))


def nxdi_pieces(config: OmniConfig, part: str) -> Pieces:
    """Return NxDI's parameters of a decoder, each with its stored tensors."""
    if part == "thinker":
        ours = thinker_pieces(config.thinker)
    else:
        assert config.talker is not None
        ours = talker_pieces(config.talker)
    for target, pieces in ours:
        match = _OUR_LAYER.match(target)
        prefix, name = "", target
        if match is not None:
            prefix, name = match[1] or "", target[match.end() :]
        if name in _STACKS:
            yield prefix + _STACKS[name], [_transposed(piece) for piece in pieces]
            continue
        for theirs, piece in zip(_SPLIT[name], pieces, strict=True):
            yield prefix + theirs, [Piece(piece.name)]


def expert_stack_shape(name: str, c: DecoderConfig) -> tuple[int, int, int]:
    """Return the shape of NxDI's stack of experts of this name."""
    assert c.moe is not None
    if name.endswith(_GATE_UP):
        return c.moe.experts, c.hidden_size, 2 * c.moe.expert_width
    return c.moe.experts, c.moe.expert_width, c.hidden_size


def rank_names(layers: int) -> list[str]:
    """Return the names of the weights that contain a core's number."""
    names = ["rank_util.rank"]
    for layer in range(layers):
        names.append(f"layers.{layer}.self_attn.rank_util.rank")
        names.append(f"layers.{layer}.mlp.expert_mlps.spmd_rank.rank")
    return names


@dataclass(frozen=True)
class CutParameter:
    """Shape of a whole parameter, and how it is sharded."""

    shape: tuple[int, ...]
    cut: Cut | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of a core's share."""
        if self.cut is None:
            return self.shape
        before, after = self.shape[: self.cut.axis], self.shape[self.cut.axis + 1 :]
        return (*before, self.cut.length, *after)


def cut_parameters(c: DecoderConfig, tp: int) -> dict[str, CutParameter]:
    """Return each parameter's sharding, by name without "layers.N.". Raises OptionError."""
    assert c.moe is not None
    moe, hidden = c.moe, c.hidden_size
    queries = query_heads(c.heads, c.kv_heads, tp)
    keys = key_heads(c.heads, c.kv_heads, tp)
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention, width = "self_attn.qkv_proj", moe.expert_width
    q_cut, q_columns = (cut_heads(axis, c.head_dim, queries) for axis in (0, 1))
    key_cut = CutParameter((kv_rows, hidden), cut_heads(0, c.head_dim, keys))
    gate_up, down = expert_stack_shape(_GATE_UP, c), expert_stack_shape(_DOWN, c)
    parameters = {
        "embed_tokens.weight": CutParameter((c.vocab_size, hidden), cut_width(1, [hidden], tp)),
        "lm_head.weight": CutParameter((c.vocab_size, hidden), cut_width(0, [c.vocab_size], tp)),
        "norm.weight": CutParameter((hidden,)),
        "input_layernorm.weight": CutParameter((hidden,)),
        "post_attention_layernorm.weight": CutParameter((hidden,)),
        "self_attn.q_layernorm.weight": CutParameter((c.head_dim,)),
        "self_attn.k_layernorm.weight": CutParameter((c.head_dim,)),
        f"{attention}.q_proj.weight": CutParameter((q_rows, hidden), q_cut),
        f"{attention}.k_proj.weight": key_cut,
        f"{attention}.v_proj.weight": key_cut,
        "self_attn.o_proj.o_proj.weight": CutParameter((hidden, q_rows), q_columns),
        "mlp.router.linear_router.weight": CutParameter((moe.experts, hidden)),
        _GATE_UP: CutParameter(gate_up, cut_width(2, [width, width], tp)),
        _DOWN: CutParameter(down, cut_width(1, [width], tp)),
    }
    parameters |= {
        _SCALES[_GATE_UP]: CutParameter((moe.experts, 1, 2 * width), parameters[_GATE_UP].cut),
        _SCALES[_DOWN]: CutParameter((moe.experts, 1, hidden)),
    }
    if shared := moe.shared_expert_width:
        shared_rows = CutParameter((shared, hidden), cut_width(0, [shared], tp))
        shared_columns = CutParameter((hidden, shared), cut_width(1, [shared], tp))
        parameters |= {
            "mlp.shared_experts.gate_proj.weight": shared_rows,
            "mlp.shared_experts.up_proj.weight": shared_rows,
            "mlp.shared_experts.down_proj.weight": shared_columns,
            "mlp.shared_experts.gate.weight": CutParameter((1, hidden)),
        }
    return parameters


def _cut_pieces(spec: DecoderSpec) -> list[tuple[str, list[Piece]]]:
    pieces = nxdi_pieces(spec.config, spec.part)
    return [
        (name, parts)
        for name, parts in pieces
        if not (spec.takes_rows and name == "embed_tokens.weight")
    ]


def _layout(spec: DecoderSpec) -> Layout:
    c = spec.decoder
    parameters = cut_parameters(c, spec.tp)
    layout: dict[str, tuple[Sequence[int], torch.dtype]] = {}
    for target, _ in _cut_pieces(spec):
        name = _file_name(target)
        own = _without_layer(name)
        int8 = spec.int8 and own in _SCALES
        layout[name] = parameters[own].local_shape, torch.int8 if int8 else spec.dtype
        if int8:
            scale = name.replace(own, _SCALES[own])
            layout[scale] = parameters[_SCALES[own]].local_shape, torch.float32
    return layout | dict.fromkeys(rank_names(c.layers), ((1,), torch.int32))


def _cut_parameters(
    pieces: Iterable[tuple[str, list[Piece]]], checkpoint: Checkpoint, spec: DecoderSpec
) -> Iterator[tuple[str, list[Tensor]]]:
    tp, dtype = spec.tp, spec.dtype
    parameters = cut_parameters(spec.decoder, tp)
    for target, parts in pieces:
        name = _file_name(target)
        parameter = parameters[_without_layer(name)]
        shape = parameter.shape
        stacked = bool(parts[0].region)
        scales = []
        with checkpoint.reader() as reader:  # mapped for one parameter only
            for _, group in groupby(parts, _expert):
                own = [replace(p, region=(0, *p.region[1:])) if stacked else p for p in group]
                whole = _read((1, *shape[1:]) if stacked else shape, own, dtype, reader)
                if stacked and spec.int8:
                    whole, scale = quantise_columns(whole)
                    scales.append(scale)
                yield name, [shard(whole, parameter.cut, rank) for rank in range(tp)]
        if scales:
            bare = _without_layer(name)
            whole, cut = torch.cat(scales), parameters[_SCALES[bare]].cut
            scale_name = name.replace(bare, _SCALES[bare])
            yield scale_name, [shard(whole, cut, rank) for rank in range(tp)]


def _read(
    shape: tuple[int, ...], pieces: Iterable[Piece], dtype: torch.dtype, reader: Reader
) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    for piece in pieces:
        copy_piece(whole, piece, reader.tensor(piece.name))
    return whole


def quantise_columns(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round matrices [experts, in, out] to int8. Returns them and scales [experts, 1, out]."""
    rounded, scale = quantise(matrix.transpose(1, 2))
    return rounded.transpose(1, 2), scale.unsqueeze(1)


def _transposed(piece: Piece) -> Piece:
    expert, *rows = piece.region
    return Piece(piece.name, (expert, slice(None), *rows), torch.t)


def _expert(piece: Piece) -> object:
    return piece.region[0] if piece.region else None


def _file_name(name: str) -> str:
    """Return a parameter's name in files: NxDI's attention wraps projections."""
    return _PROJECTION.sub(
        lambda match: f"self_attn.{'o' if match[1] == 'o' else 'qkv'}_proj.{match[1]}_proj.weight",
        name,
    )


def _without_layer(name: str) -> str:
    return _LAYER.sub("", name)
