"""The files of each core's weights against those that NxDI's own builder makes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import DECODERS, DecoderSpec
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import write_decoder_shards
from qwen3_omni_neuron.neuron.part import rank_file
from testing.specs import decoder_plan

INT8 = "thinker in int8"


def plan_of(tp: int, dtype: str = "bfloat16") -> CompilePlan:
    return decoder_plan(tp, 2, 96, dtype=dtype)


@pytest.fixture
def as_on_a_device(nxdi, monkeypatch) -> None:
    """NxD's builder pretends to be one of several ranks, which its CPU mode can't."""
    monkeypatch.setenv("NXD_CPU_MODE", "0")


def assert_files_alike(ours: Path, theirs: Path, tp: int) -> None:
    """ours: a decoder's folder; theirs: that of NxDI's files."""
    for rank in range(tp):
        mine = load_file(ours / rank_file(rank))
        expected = load_file(theirs / Path(rank_file(rank)).name)
        assert mine.keys() == expected.keys()
        for name, tensor in expected.items():
            assert mine[name].dtype == tensor.dtype, name
            assert torch.equal(mine[name], tensor), f"{name} of rank {rank}"
    assert len(list((ours / "weights").iterdir())) == tp


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("part", [*DECODERS, INT8])
def test_each_core_gets_what_nxdi_would_give_it(
    as_on_a_device, checkpoint, config, tmp_path, part, tp
) -> None:
    """Two KV heads: cut at TP 2, held twice at TP 4, four times at TP 8, with four query heads."""
    from testing.neuron.cpu_mode_decoder import WholeWeights

    spec = DecoderSpec(
        part.partition(" ")[0], config, plan_of(tp, "int8" if part == INT8 else "bfloat16")
    )
    theirs = WholeWeights(spec, Checkpoint(checkpoint))
    theirs.get_builder().shard_checkpoint(str(tmp_path / "theirs"))
    write_decoder_shards(spec, Checkpoint(checkpoint), tmp_path)
    assert_files_alike(tmp_path, tmp_path / "theirs", tp)


def test_another_lnc_in_the_environment_is_refused(nxdi, config, monkeypatch) -> None:
    """NxDI would take it without a word."""
    from qwen3_omni_neuron.neuron.nxdi.application import DecoderApplication

    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    with pytest.raises(OptionError, match=r"NEURON_LOGICAL_NC_CONFIG is 1, but the plan has LNC=2"):
        DecoderApplication(DecoderSpec("thinker", config, plan_of(1)))
