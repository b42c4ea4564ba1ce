"""Each core's weights of a decoder on Neuron: nothing lost, nothing twice, little in memory; and
the plans that are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.tensor_file import write_tensor_files
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.errors import CheckpointError, OptionError
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig
from qwen3_omni_neuron.neuron.graphs.cut import Cut, shard
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import (
    DecoderSpec,
    decoder_spec,
)
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import (
    cut_parameters,
    decoder_shard_bytes,
    write_decoder_shards,
)
from qwen3_omni_neuron.neuron.part import rank_file
from testing.neuron.whole_weights import whole_weights
from testing.parallel import unshard
from testing.released import RELEASED, TALKER, THINKER
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
def test_the_released_parameters_can_be_put_together_again(c: DecoderConfig, tp: int) -> None:
    for name, parameter in cut_parameters(c, tp).items():
        assert_inverse(name, parameter.shape, parameter.cut, tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("part", DECODERS)
def test_the_files_hold_the_checkpoint(
    config: OmniConfig, checkpoint: Path, tmp_path: Path, part: str, tp: int
) -> None:
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


def test_a_checkpoint_of_another_size_is_refused(
    config: OmniConfig, checkpoint: Path, tmp_path: Path
) -> None:
    vocabulary = config.thinker.text.vocab_size + 8
    text = replace(config.thinker.text, vocab_size=vocabulary)
    other = replace(config, thinker=replace(config.thinker, text=text))
    spec = DecoderSpec("thinker", other, plan_of(1))
    with pytest.raises(CheckpointError, match=r"has shape .*config\.json says"):
        write_decoder_shards(spec, Checkpoint(checkpoint), tmp_path)


def test_files_written_together_have_each_its_own_rows(tmp_path: Path) -> None:
    """A tensor whole, and one that comes in parts; each file has its own."""
    paths = [tmp_path / name for name in ("a", "b")]
    layout = {"ranks": ((1,), torch.int32), "stack": ((3, 2), torch.bfloat16)}
    rows = [torch.full((1, 2), float(row), dtype=torch.bfloat16) for row in range(3)]
    ranks = list(torch.arange(2, dtype=torch.int32).split(1))
    parts = [("ranks", ranks), *(("stack", [row, row + 10]) for row in rows)]
    write_tensor_files(paths, layout, parts)
    for index, path in enumerate(paths):
        held = load_file(path)
        assert held["ranks"].tolist() == [index]
        assert held["stack"].tolist() == [[row + 10.0 * index] * 2 for row in range(3)]
    with pytest.raises(AssertionError, match="not all tensors came"):
        write_tensor_files([tmp_path / "c", tmp_path / "d"], layout, parts[:-1])


# Memory: cut a checkpoint of two large layers, and watch.


# Plans.


def test_prompts_beyond_a_decoders_kv_cache_are_refused() -> None:
    plan = plan_of(4, talker_context_length=95)
    assert decoder_spec(RELEASED, plan, "thinker").plan.context_length == 96
    with pytest.raises(OptionError, match="prompt_buckets has 96, and the talker's KV cache 95"):
        decoder_spec(RELEASED, plan, "talker")
