"""A decoder's weights as NxDI loads them: a file a core, written one parameter at a time.

NxDI's own way to these files holds the whole checkpoint, and then every core's share of it beside
it. Here a parameter is read, cut and written to all files before the next is read; of a stack of
experts, one expert. The files are those of NxDI's get_sharded_checkpoint for our decoder:

    embed_tokens                     hidden size cut                     thinker alone
    lm_head                          vocabulary cut, padded
    self_attn.qkv_proj.{q,k,v}_proj  heads cut; KV heads held by several cores where they are fewer
    self_attn.o_proj.o_proj          heads cut
    mlp.expert_mlps.mlp_op.*         each expert's width cut; gate and up each on its own
    mlp.shared_experts.*_proj        the shared expert's width cut
    *rank_util.rank, *spmd_rank.rank the core's number
    the rest                         whole on every core
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.names import Piece
from qwen3_omni_neuron.checkpoint.parameters import compare_names, copy_piece
from qwen3_omni_neuron.checkpoint.tensor_file import Layout, write_tensor_files
from qwen3_omni_neuron.graphs.parallel.cut import Cut, cut_heads, cut_width, shard
from qwen3_omni_neuron.graphs.parallel.heads import key_heads, query_heads
from qwen3_omni_neuron.model.config import DecoderConfig
from qwen3_omni_neuron.neuron.nxdi.weights import ranks_of, stack_shape
from qwen3_omni_neuron.neuron.part_files import WEIGHTS_FOLDER, rank_file

_LAYER = re.compile(r"layers\.\d+\.")
_RENAMED = re.compile(r"self_attn\.([qkvo])_proj\.weight")


@dataclass(frozen=True)
class Held:
    """A parameter: its whole shape, and what of it each core holds."""

    shape: tuple[int, ...]
    cut: Cut | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.cut is None:
            return self.shape
        before, after = self.shape[: self.cut.axis], self.shape[self.cut.axis + 1 :]
        return (*before, self.cut.length, *after)


def held_parameters(c: DecoderConfig, tp: int, expert_multiple: int = 1) -> dict[str, Held]:
    """By the part of NxDI's name that follows "layers.N.", or by the name.

    expert_multiple: a core's part of a routed expert's width is padded to a multiple of it.
    Raises OptionError where KV heads and cores don't divide.
    """
    assert c.moe is not None
    moe, hidden = c.moe, c.hidden_size
    queries = query_heads(c.heads, c.kv_heads, tp)
    keys = key_heads(c.heads, c.kv_heads, tp)
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention, mlp = "self_attn.qkv_proj", "mlp.expert_mlps.mlp_op"
    width = moe.expert_width
    gate_up = f"{mlp}.gate_up_proj.weight"
    down = f"{mlp}.down_proj.weight"
    key_rows = Held((kv_rows, hidden), cut_heads(0, c.head_dim, keys))
    held = {
        "embed_tokens.weight": Held((c.vocab_size, hidden), cut_width(1, [hidden], tp)),
        "lm_head.weight": Held((c.vocab_size, hidden), cut_width(0, [c.vocab_size], tp)),
        "norm.weight": Held((hidden,)),
        "input_layernorm.weight": Held((hidden,)),
        "post_attention_layernorm.weight": Held((hidden,)),
        "self_attn.q_layernorm.weight": Held((c.head_dim,)),
        "self_attn.k_layernorm.weight": Held((c.head_dim,)),
        f"{attention}.q_proj.weight": Held((q_rows, hidden), cut_heads(0, c.head_dim, queries)),
        f"{attention}.k_proj.weight": key_rows,
        f"{attention}.v_proj.weight": key_rows,
        "self_attn.o_proj.o_proj.weight": Held((hidden, q_rows), cut_heads(1, c.head_dim, queries)),
        "mlp.router.linear_router.weight": Held((moe.experts, hidden)),
        gate_up: Held(stack_shape(gate_up, c), cut_width(2, [width, width], tp, expert_multiple)),
        down: Held(stack_shape(down, c), cut_width(1, [width], tp, expert_multiple)),
    }
    if shared := moe.shared_expert_width:
        shared_rows = Held((shared, hidden), cut_width(0, [shared], tp))
        shared_columns = Held((hidden, shared), cut_width(1, [shared], tp))
        held |= {
            "mlp.shared_experts.gate_proj.weight": shared_rows,
            "mlp.shared_experts.up_proj.weight": shared_rows,
            "mlp.shared_experts.down_proj.weight": shared_columns,
            "mlp.shared_experts.gate.weight": Held((1, hidden)),
        }
    return held


def write_decoder_shards(
    folder: Path,
    checkpoint: Checkpoint,
    pieces: Iterable[tuple[str, list[Piece]]],
    c: DecoderConfig,
    dtype: torch.dtype,
    tp: int,
    takes_rows: bool,
    expert_multiple: int = 1,
) -> None:
    """Write every core's file under `folder`, which exists. Nothing may be there yet.

    pieces: of weights.nxdi_pieces. takes_rows: the decoder embeds no tokens, so the table is left
    out. Host memory: one parameter, or one expert, and what is cut of it.
    Raises CheckpointError as weights.nxdi_state, OptionError as held_parameters, OSError.
    """
    chosen = [(n, parts) for n, parts in pieces if not (takes_rows and n == "embed_tokens.weight")]
    compare_names(
        {part.name for _, parts in chosen for part in parts}, set(), set(checkpoint.names)
    )
    held = held_parameters(c, tp, expert_multiple)
    layout = shard_layout([name for name, _ in chosen], c, dtype, tp, takes_rows, expert_multiple)

    def parts_of_files() -> Iterator[tuple[str, Sequence[Tensor]]]:
        yield from _cut_parameters(chosen, checkpoint, held, dtype, tp)
        for name in ranks_of(c.layers):
            yield name, list(torch.arange(tp, dtype=torch.int32).split(1))

    (folder / WEIGHTS_FOLDER).mkdir()
    paths = [folder / rank_file(rank) for rank in range(tp)]
    write_tensor_files(paths, layout, parts_of_files())


def shard_layout(
    names: Iterable[str],
    c: DecoderConfig,
    dtype: torch.dtype,
    tp: int,
    takes_rows: bool,
    expert_multiple: int = 1,
) -> Layout:
    """What every core's file holds. names: of weights.nxdi_pieces; the rest as
    write_decoder_shards."""
    held = held_parameters(c, tp, expert_multiple)
    renamed = [_renamed(n) for n in names if not (takes_rows and n == "embed_tokens.weight")]
    layout: dict[str, tuple[Sequence[int], torch.dtype]] = {
        name: (held[_own(name)].local_shape, dtype) for name in renamed
    }
    return layout | dict.fromkeys(ranks_of(c.layers), ((1,), torch.int32))


def _cut_parameters(
    pieces: Iterable[tuple[str, list[Piece]]],
    checkpoint: Checkpoint,
    held: dict[str, Held],
    dtype: torch.dtype,
    tp: int,
) -> Iterator[tuple[str, list[Tensor]]]:
    """What each core holds of each parameter; of stacks, expert after expert."""
    for target, parts in pieces:
        name = _renamed(target)
        parameter = held[_own(name)]
        shape = parameter.shape
        stacked = bool(parts[0].region)
        with checkpoint.reader() as reader:  # mapped no longer than a parameter takes
            for _, group in groupby(parts, _expert):
                whole = torch.empty((1, *shape[1:]) if stacked else shape, dtype=dtype)
                for part in group:
                    at = replace(part, region=(0, *part.region[1:])) if stacked else part
                    copy_piece(whole, at, reader.tensor(part.name))
                yield name, [shard(whole, parameter.cut, rank) for rank in range(tp)]


def _expert(piece: Piece) -> object:
    return piece.region[0] if piece.region else None


def _renamed(name: str) -> str:
    """NxDI's attention holds its projections in parts of their own."""
    return _RENAMED.sub(
        lambda match: f"self_attn.{'o' if match[1] == 'o' else 'qkv'}_proj.{match[1]}_proj.weight",
        name,
    )


def _own(name: str) -> str:
    return _LAYER.sub("", name)
