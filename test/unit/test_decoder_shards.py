"""Each core's weights of a decoder on Neuron: nothing lost, nothing twice, little in memory; and
the plans that are refused."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.neuron.graphs.cut import Cut, shard
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DecoderSpec
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import (
    cut_parameters,
    decoder_shard_bytes,
    write_decoder_shards,
)
from qwen3_omni_neuron.neuron.part import rank_file
from testing.neuron.whole_weights import whole_weights
from testing.parallel import unshard
from testing.released import TALKER, THINKER
from testing.specs import decoder_plan

DECODERS = {"thinker": THINKER.text, "talker": TALKER.text}


def plan_of(tp: int, **changes: object) -> CompilePlan:
    return decoder_plan(tp, 4, 96, **changes)


def assert_inverse(name: str, shape: tuple[int, ...], cut: Cut | None, tp: int) -> None:
    """Along the cut axis alone: every position of it is somewhere, and where it is said to be."""
    if cut is None:
        return
    whole = torch.arange(1.0, shape[cut.axis] + 1)
    flat = Cut(0, cut.spans)
    shards = [shard(whole, flat, rank) for rank in range(tp)]
    assert torch.equal(unshard(shards, flat), whole), name
    assert {len(part) for part in shards} == {cut.length}, name


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("c", DECODERS.values(), ids=DECODERS)
def test_the_released_parameters_can_be_put_together_again(c, tp) -> None:
    for name, parameter in cut_parameters(c, tp).items():
        assert_inverse(name, parameter.shape, parameter.cut, tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("part", DECODERS)
def test_the_files_hold_the_checkpoint(config, checkpoint, tmp_path, part, tp) -> None:
    spec = DecoderSpec(part, config, plan_of(tp))
    write_decoder_shards(spec, Checkpoint(checkpoint), tmp_path)
    files = [load_file(tmp_path / rank_file(rank)) for rank in range(tp)]
    assert decoder_shard_bytes(spec) == sum(t.nbytes for file in files for t in file.values())
    parameters = cut_parameters(spec.decoder, tp)
    state = whole_weights(spec, Checkpoint(checkpoint))
    names = set(state)
    if part == "talker":
        names.remove("embed_tokens.weight")  # its rows come from the host
    for name in names:
        theirs = name
        for letter, owner in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("o", "o")):
            inner = f"{owner}_proj.{letter}_proj"
            theirs = theirs.replace(f"self_attn.{letter}_proj", f"self_attn.{inner}")
        shards = [file.pop(theirs) for file in files]
        if name.endswith("rank"):
            assert [part.tolist() for part in shards] == [[rank] for rank in range(tp)]
            continue
        cut = parameters[theirs.split(".", 2)[2] if theirs.startswith("layers.") else theirs].cut
        assert torch.equal(unshard(shards, cut), state[name]), name
    assert not any(files)


def test_a_checkpoint_of_another_size_is_refused(config, checkpoint, tmp_path) -> None:
    vocabulary = config.thinker.text.vocab_size + 8
    text = replace(config.thinker.text, vocab_size=vocabulary)
    other = replace(config, thinker=replace(config.thinker, text=text))
    spec = DecoderSpec("thinker", other, plan_of(1))
    with pytest.raises(CheckpointError, match=r"has shape .*config\.json requires"):
        write_decoder_shards(spec, Checkpoint(checkpoint), tmp_path)
