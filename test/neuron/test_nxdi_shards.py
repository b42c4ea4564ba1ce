"""The files of each core's weights against those that NxDI's own builder makes."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.tiny import write_tiny_checkpoint
from qwen3_omni_neuron.checkpoint.tiny.sizes import SIZES, resized
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.neuron.nxdi.decoder_spec import (
    DECODERS,
    DecoderSpec,
    blockwise_options,
)
from qwen3_omni_neuron.neuron.nxdi.decoder_weights import write_decoder_shards
from qwen3_omni_neuron.neuron.part import rank_file
from testing.released import RELEASED
from testing.specs import decoder_plan

INT8 = "thinker in int8"


def plan_of(tp: int, dtype: str = "bfloat16", profile: str = "safe") -> CompilePlan:
    return decoder_plan(tp, 2, 96, dtype=dtype, profile=profile)


@pytest.fixture
def as_on_a_device(nxdi: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    as_on_a_device: None,
    checkpoint: Path,
    config: OmniConfig,
    tmp_path: Path,
    part: str,
    tp: int,
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


def test_the_kernels_padding_is_that_of_nxdis_own_model(
    as_on_a_device: None, tmp_path: Path
) -> None:
    """NxDI's Qwen3-MoE pads gate and up each at its end, then cuts."""
    from testing.neuron.cpu_mode_decoder import WholeWeights

    tp, padded = 2, 2 * 256
    thinker = {
        "text_config": {"hidden_size": 512, "num_hidden_layers": 3},
        "audio_config": {"output_dim": 512},
        "vision_config": {"out_hidden_size": 512},
    }
    talker = {"thinker_hidden_size": 512, "accept_hidden_layer": 1}
    size = resized(SIZES["tiny"], {"thinker_config": thinker, "talker_config": talker})
    folder = write_tiny_checkpoint(tmp_path / "wide", size=size)
    config = read_config(folder)
    spec = DecoderSpec("thinker", config, plan_of(tp, "float32", profile="fast"))
    theirs = WholeWeights(spec, Checkpoint(folder))
    whole = theirs.checkpoint_loader_fn
    experts = "mlp.expert_mlps.mlp_op"

    def padded_whole(mmap: bool = False) -> dict[str, torch.Tensor]:
        state = whole()
        for name, tensor in state.items():
            extra = padded - config.thinker.text.moe.expert_width
            if name.endswith(f"{experts}.gate_up_proj.weight"):
                state[name] = F.pad(tensor.unflatten(2, (2, -1)), (0, extra)).flatten(2)
            if name.endswith(f"{experts}.down_proj.weight"):
                state[name] = F.pad(tensor, (0, 0, 0, extra))
        return state

    builder = theirs.get_builder()
    builder.checkpoint_loader = padded_whole
    builder.shard_checkpoint(str(tmp_path / "theirs"))
    write_decoder_shards(spec, Checkpoint(folder), tmp_path)
    assert_files_alike(tmp_path, tmp_path / "theirs", tp)
    weights = load_file(tmp_path / rank_file(1))
    assert weights[f"layers.1.{experts}.gate_up_proj.weight"].shape[-1] == padded


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("part", DECODERS)
def test_nxdi_takes_the_config_of_each_profile(nxdi: None, part: str, tp: int) -> None:
    """At the released sizes. What the kernels do is not run here."""
    from neuronx_distributed.modules.moe.blockwise import check_blockwise_mm_kernel_compatibility

    from qwen3_omni_neuron.neuron.nxdi.inference_config import inference_config

    for profile in ("safe", "fast"):
        plan = plan_of(tp, profile=profile)
        spec = DecoderSpec(part, RELEASED, plan)
        config = inference_config(spec)
        blockwise = config.neuron_config.blockwise_matmul_config
        for name, value in blockwise_options(plan).items():
            assert getattr(blockwise, name) == value
        assert blockwise.use_torch_block_wise == (profile == "safe")
        assert blockwise.use_shard_on_intermediate_dynamic_while == (profile == "fast")
        assert config.neuron_config.logical_nc_config == 2
        width = config.intermediate_size // tp
        assert width % 256 == 0 or profile == "safe"
    check_blockwise_mm_kernel_compatibility(
        hidden_size=spec.decoder.hidden_size,
        block_size=blockwise.block_size,
        intermediate_size_tp=width,
    )


def test_another_lnc_in_the_environment_is_refused(
    nxdi: None, config: OmniConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NxDI would take it without a word."""
    from qwen3_omni_neuron.neuron.nxdi.application import DecoderApplication

    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    with pytest.raises(OptionError, match=r"NEURON_LOGICAL_NC_CONFIG is 1, and the plan has LNC=2"):
        DecoderApplication(DecoderSpec("thinker", config, plan_of(1)))
