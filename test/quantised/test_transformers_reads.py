"""Quantised checkpoints against the transformers that reads their form: weights, text and codes.

Other versions leave weights random, with a warning or none. `make test-quantised` runs these tests
with those that do not; elsewhere they are skipped. No version has been found that reads, on a CPU,

- modelopt by that name: no transformers up to 5.23 knows it. "fp8 matrix" has its numbers and
  scales, in files of compressed-tensors.

test_package_writers.py compares it with the package that writes it.
"""

import importlib.util
import re
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.verification.oracle import Reference
from testing.quantised_by_packages import write_auto_round, write_compressed_tensors
from testing.quantised_checkpoint import block_fp8, gptq, write_quantised_checkpoint
from testing.replies import assert_equal_replies

GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def needs(**packages: str) -> None:
    """Skip a test unless these packages are installed, in versions that begin so."""
    for package, wanted in packages.items():
        found = importlib.util.find_spec(package)
        if found is None or not version(package.replace("_", "-")).startswith(wanted):
            pytest.skip(f"no {package} {wanted}, which reads this form")


def effective_weight(reference: Reference, name: str) -> Tensor:
    """Return a matrix that the reference computes with, float32 [out, into]: times the identity.

    name: the released name. transformers 5 has all experts of a layer in one parameter.
    """
    module_name = name.removesuffix(".weight")
    layer, _, expert = module_name.partition(".mlp.experts.")
    experts = reference.model.get_submodule(f"{layer}.mlp.experts") if expert else None
    if experts is not None and hasattr(experts, "gate_up_proj"):
        number, kind = expert.split(".")
        if kind == "down_proj":
            return experts.down_proj[int(number)].float()
        gate, up = experts.gate_up_proj[int(number)].float().chunk(2)
        return gate if kind == "gate_proj" else up
    module = reference.model.get_submodule(module_name)
    into = Checkpoint(Path(reference.model.name_or_path)).quantised[name].shape[1]
    return module(torch.eye(into)).t().float()


@torch.no_grad()
def assert_equal_weights(folder: Path, reference: Reference, quantised: int) -> None:
    checkpoint = Checkpoint(folder)
    assert len(checkpoint.quantised) == quantised
    with checkpoint.reader() as reader:
        for name in checkpoint.quantised:
            assert torch.equal(reader.tensor(name), effective_weight(reference, name)), name


KEPT_IN_BLOCKS = ["thinker.lm_head", "thinker.audio_tower", "thinker.visual", "code2wav"]
KEPT_IN_BLOCKS += ["mlp.gate", "shared_expert_gate", "codec_head", "projection", "code_predictor"]
LAYERS = re.compile(
    r"(thinker|talker)\.model\.layers\.\d+\.(self_attn|mlp|mlp\.experts\.\d+|mlp\.shared_expert)"
    r"\.\w+_proj\.weight"
)
COMPRESSED = {
    "int4": ("pack-quantized", {**GROUPS, "symmetric": True}),
    "int8": ("pack-quantized", {**GROUPS, "num_bits": 8, "symmetric": True}),
    "fp8 matrix": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_checkpoints_are_read_as_transformers_reads_them(
    checkpoint, tmp_path, name
) -> None:
    needs(transformers="4.57", compressed_tensors="0.14")
    form, weights = COMPRESSED[name]
    folder = write_compressed_tensors(checkpoint, tmp_path / "made", form, **weights)
    reference = Reference(folder)
    assert_equal_weights(folder, reference, 84)
    assert_equal_replies(folder, reference)


def assert_equal_to_auto_round(
    folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with transformers that reads a folder by auto-round.

    auto-round makes all of the model float16, so its weights are put into the reference's. It also
    replaces a method of the talker by one that fails in transformers 4.57.
    """
    reference = Reference(checkpoint)
    talker, model = type(reference.model.talker), type(reference.model)
    with monkeypatch.context() as undone:
        method = "prepare_inputs_for_generation"
        undone.setattr(talker, method, getattr(talker, method))
        by_auto_round = partial(
            model.from_pretrained, quantization_config=transformers.AutoRoundConfig()
        )
        undone.setattr(model, "from_pretrained", by_auto_round)
        of_auto_round = Reference(folder)
    torch.nn.Module.float(of_auto_round.model)  # its own `float` refuses
    assert_equal_weights(folder, of_auto_round, 84)
    for name in Checkpoint(folder).quantised:
        reference.model.get_parameter(name).data.copy_(effective_weight(of_auto_round, name))
    assert_equal_replies(folder, reference)


def test_auto_round_checkpoints_are_read_as_transformers_reads_them(
    checkpoint, tmp_path, monkeypatch
) -> None:
    needs(transformers="4.57", auto_round="0.16")
    folder = write_auto_round(checkpoint, tmp_path / "made")
    assert_equal_to_auto_round(folder, checkpoint, monkeypatch)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
# What auto-round asks of a config to leave the other matrices as they are.
THINKER_LAYERS = {
    "block_name_to_quantize": "thinker.model.layers",
    "extra_config": {r".*mlp\.gate": {"bits": 16, "data_type": "float"}},
}


def test_gptq_is_read_as_transformers_reads_it(checkpoint, tmp_path, monkeypatch) -> None:
    """transformers converts its settings to auto-round's; its own reader wants a GPU."""
    needs(transformers="4.57", auto_round="0.16")
    pytest.importorskip("auto_round_kernel", reason="no auto-round-lib, which reads this form")
    writer = gptq()
    folder, _ = write_quantised_checkpoint(
        checkpoint,
        tmp_path,
        lambda stored: (
            writer if stored.startswith("thinker") and LAYERS.fullmatch(stored) else None
        ),
        {**GPTQ, **THINKER_LAYERS},
    )
    assert_equal_to_auto_round(folder, checkpoint, monkeypatch)


@pytest.mark.parametrize("size", [16, 128])
def test_fp8_in_blocks_is_read_as_transformers_reads_it(checkpoint, tmp_path, size) -> None:
    """Thinker and talker; in tiny matrices a block of 128 is a whole matrix.

    No block is partial: 5.13 takes matrices to be divided in equal blocks.
    """
    needs(transformers="5.13", accelerate="1")
    settings = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [size, size],
        "modules_to_not_convert": KEPT_IN_BLOCKS,
    }
    writer = block_fp8(size)
    folder, _ = write_quantised_checkpoint(
        checkpoint, tmp_path, lambda name: writer if LAYERS.fullmatch(name) else None, settings
    )
    reference = Reference(folder)
    assert_equal_weights(folder, reference, 146)
    assert_equal_replies(folder, reference)
