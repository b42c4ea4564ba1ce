"""The layout of weights that NxDI wants, from the released names. Needs no NxDI."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.names import Piece, talker_pieces, thinker_pieces
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.nxdi.weights import nxdi_pieces, nxdi_state, rank_state

Ours = list[tuple[str, list[Piece]]]
PREFIXES = {
    "thinker": ("thinker.model.", "thinker.lm_head."),
    "talker": ("talker.model.", "talker.codec_head."),
}


def ours_of(config: OmniConfig, part: str) -> Ours:
    assert config.talker is not None
    return list(
        thinker_pieces(config.thinker) if part == "thinker" else talker_pieces(config.talker)
    )


@pytest.mark.parametrize("part", PREFIXES)
def test_every_released_name_has_one_place(config: OmniConfig, checkpoint: Path, part: str) -> None:
    pieces = list(nxdi_pieces(ours_of(config, part)))
    targets = [target for target, _ in pieces]
    used = [piece.name for _, parts in pieces for piece in parts]
    assert len(set(targets)) == len(targets)
    stored = [n for n in Checkpoint(checkpoint).names if n.startswith(PREFIXES[part])]
    assert sorted(used) == sorted(stored)


@pytest.mark.parametrize("part", PREFIXES)
def test_the_stored_tensors_can_be_read_back(
    config: OmniConfig, checkpoint: Path, part: str
) -> None:
    c = getattr(config, part).text
    ours = ours_of(config, part)
    state = nxdi_state(nxdi_pieces(ours), c, Checkpoint(checkpoint), torch.float32)
    covered = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with Checkpoint(checkpoint).reader() as reader:
        for target, parts in nxdi_pieces(ours):
            for piece in parts:
                region = state[target][piece.region]
                back = piece.convert(region) if piece.convert else region  # t() undoes itself
                assert torch.equal(back, reader.tensor(piece.name).float()), piece.name
                covered[target][piece.region] += 1
    assert all((times == 1).all() for times in covered.values())


def test_q_k_and_v_and_gate_and_up_keep_their_names(config: OmniConfig) -> None:
    pieces = {t: parts[0].name for t, parts in nxdi_pieces(ours_of(config, "talker"))}
    for letter in "qkv":
        stored = pieces[f"layers.1.self_attn.{letter}_proj.weight"]
        assert stored == f"talker.model.layers.1.self_attn.{letter}_proj.weight"
    for name in ("gate", "up"):
        stored = pieces[f"layers.0.mlp.shared_experts.{name}_proj.weight"]
        assert stored == f"talker.model.layers.0.mlp.shared_expert.{name}_proj.weight"


def test_a_checkpoint_of_another_size_is_refused(config: OmniConfig, checkpoint: Path) -> None:
    c = config.thinker.text
    assert c.moe is not None
    narrow = replace(c, moe=replace(c.moe, expert_width=c.moe.expert_width // 2))
    thinker = replace(config.thinker, text=narrow)
    pieces = nxdi_pieces(thinker_pieces(thinker))
    with pytest.raises(CheckpointError, match=r"has shape \[64, 32\]; config.json says"):
        nxdi_state(pieces, narrow, Checkpoint(checkpoint), torch.float32)


def test_a_missing_tensor_is_named(config: OmniConfig, checkpoint: Path) -> None:
    assert config.talker is not None
    deeper = replace(config.talker.text, layers=config.talker.text.layers + 1)
    talker = replace(config.talker, text=deeper)
    with pytest.raises(CheckpointError, match=r"lacks .*talker\.model\.layers\.2\."):
        nxdi_state(
            nxdi_pieces(talker_pieces(talker)), deeper, Checkpoint(checkpoint), torch.float32
        )


def test_every_core_learns_its_rank() -> None:
    state = rank_state(layers=2, tp=4)
    assert set(state) == {
        "rank_util.rank",
        *(f"layers.{i}.self_attn.rank_util.rank" for i in (0, 1)),
        *(f"layers.{i}.mlp.expert_mlps.spmd_rank.rank" for i in (0, 1)),
    }
    assert all(ranks.tolist() == [0, 1, 2, 3] for ranks in state.values())
