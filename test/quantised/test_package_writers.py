"""Matrices packed by the packages that publish quantised checkpoints: read as they read them.

`make test-quantised` runs these tests; where a package is absent, its cases are skipped.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES
from qwen3_omni_neuron.cpu.weights import load_checkpoint_models
from testing import package_writers as packages
from testing.models import load_models
from testing.quantised_checkpoint import Writer, write_quantised_checkpoint

THINKER = re.compile(
    r"thinker\.model\.layers\.\d+\.(self_attn|mlp|mlp\.experts\.\d+)\.\w+_proj\.weight"
)


@dataclass(frozen=True)
class Case:
    """A form as a package writes it. kept: whether dtype int4 keeps its numbers."""

    package: str
    writer: Writer
    settings: Mapping[str, Any]
    kept: bool = False


GPTQ = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
MODELOPT = {"quant_method": "modelopt"}
CASES = {
    "auto_gptq": Case(
        "auto_round", packages.auto_round, {**GPTQ, "packing_format": "auto_round:auto_gptq"}, True
    ),
    "pack int4": Case("compressed_tensors", packages.compressed_tensors(4), PACKED, True),
    "pack int8": Case("compressed_tensors", packages.compressed_tensors(8), PACKED),
    "modelopt": Case("modelopt", packages.modelopt_fp8, MODELOPT),
    "nvfp4": Case(
        "compressed_tensors",
        packages.compressed_tensors_nvfp4,
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
    "modelopt nvfp4": Case("modelopt", packages.modelopt_nvfp4, MODELOPT),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_the_package_computes(checkpoint, config, tmp_path, name) -> None:
    """Bit for bit in float32, and in dtype int4 where it keeps the numbers."""
    case = CASES[name]
    reason = f"{case.package}, which packs matrices, is not installed"
    pytest.importorskip(case.package, reason=reason)
    quantised, widened = write_quantised_checkpoint(
        checkpoint, tmp_path, lambda n: case.writer if THINKER.fullmatch(n) else None, case.settings
    )
    theirs = load_file(widened / "model.safetensors")
    ours = Checkpoint(quantised)
    assert len(ours.quantised) == 84
    with ours.reader() as reader:
        for stored in ours.quantised:
            assert torch.equal(reader.tensor(stored), theirs[stored]), stored
    thinker = load_models(Checkpoint(widened), config, torch.float32, ("thinker",)).thinker
    kept = load_checkpoint_models(ours, config, "int4", STAGES, packed=False).thinker
    exact = dict(thinker.named_parameters())
    layers = r"decoder\.layers\..*(qkv\.weight|out\.weight|gate_up|down)"
    same = [
        torch.equal(tensor.float(), exact[parameter])
        for parameter, tensor in kept.named_parameters()
        if re.fullmatch(layers, parameter)
    ]
    assert len(same) == 12 and all(same) == case.kept
