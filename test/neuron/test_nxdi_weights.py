"""The layout of weights that NxDI wants, from the released names. Needs no NxDI."""

import pytest
import torch

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import (
    nxdi_pieces,
    rank_names,
)
from testing.neuron.whole_weights import whole_weights
from testing.specs import decoder_plan

PLAN = decoder_plan(1, 1, 64)
PREFIXES = {
    "thinker": ("thinker.model.", "thinker.lm_head."),
    "talker": ("talker.model.", "talker.codec_head."),
}


@pytest.mark.parametrize("part", PREFIXES)
def test_every_released_name_has_one_place(config, checkpoint, part) -> None:
    pieces = list(nxdi_pieces(config, part))
    targets = [target for target, _ in pieces]
    used = [piece.name for _, parts in pieces for piece in parts]
    assert len(set(targets)) == len(targets)
    stored = [n for n in Checkpoint(checkpoint).names if n.startswith(PREFIXES[part])]
    assert sorted(used) == sorted(stored)


@pytest.mark.parametrize("part", PREFIXES)
def test_the_stored_tensors_can_be_read_back(config, checkpoint, part) -> None:
    state = whole_weights(DecoderSpec(part, config, PLAN), Checkpoint(checkpoint))
    covered = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with Checkpoint(checkpoint).reader() as reader:
        for target, parts in nxdi_pieces(config, part):
            for piece in parts:
                region = state[target][piece.region]
                back = piece.convert(region) if piece.convert else region  # t() undoes itself
                assert torch.equal(back, reader.tensor(piece.name).float()), piece.name
                covered[target][piece.region] += 1
    ranks = rank_names(getattr(config, part).text.layers)
    assert all((times == (name not in ranks)).all() for name, times in covered.items())


def test_every_core_learns_its_rank() -> None:
    """By these names; test_decoder_shards reads the numbers from the files."""
    assert set(rank_names(layers=2)) == {
        "rank_util.rank",
        *(f"layers.{i}.self_attn.rank_util.rank" for i in (0, 1)),
        *(f"layers.{i}.mlp.expert_mlps.spmd_rank.rank" for i in (0, 1)),
    }
