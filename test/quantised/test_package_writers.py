"""Matrices packed by the packages that publish quantised checkpoints: read as they read them.

`make test-quantised` runs these tests; where a package is absent, its cases are skipped.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import STAGES
from qwen3_omni_neuron.cpu.weights import load_checkpoint_models
from qwen3_omni_neuron.model.config import OmniConfig
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
    writer: Callable[[], Writer]
    settings: Mapping[str, Any]
    kept: bool


GPTQ = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
ONE_LESS = {**GPTQ, "packing_format": "auto_round:auto_gptq"}
ORDERED = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
WHOLE = {**GPTQ, "packing_format": "auto_round", "sym": False}


def compressed(form: str, kept: bool, **weights: Any) -> Case:
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    return Case(
        "compressed_tensors",
        lambda: packages.compressed_tensors(form, **weights),
        settings,
        kept,
    )


GROUPS = {"type": "int", "strategy": "group", "group_size": 32}
ROWS: dict[str, Any] = {"num_bits": 8, "strategy": "channel", "symmetric": True}
CASES = {
    "auto_gptq": Case("auto_round", packages.auto_round, ONE_LESS, True),
    "auto_gptq asym": Case(
        "auto_round", lambda: packages.auto_round(symmetric=False), {**ONE_LESS, "sym": False}, True
    ),
    "auto_gptq int8": Case(
        "auto_round", lambda: packages.auto_round(8), {**ONE_LESS, "bits": 8}, False
    ),
    "auto_round asym": Case(
        "auto_round", lambda: packages.auto_round(symmetric=False, one_less=False), WHOLE, True
    ),
    "awq": Case(
        "auto_round",
        lambda: packages.auto_round_awq,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        True,
    ),
    "gptq act order": Case(
        "neural_compressor", packages.neural_compressor, {**ORDERED, "sym": True}, True
    ),
    "gptq act order asym": Case(
        "neural_compressor",
        lambda: packages.neural_compressor(symmetric=False),
        {**ORDERED, "sym": False},
        True,
    ),
    "pack int4": compressed("pack-quantized", True, num_bits=4, symmetric=True, **GROUPS),
    "pack int4 asym": compressed("pack-quantized", True, num_bits=4, symmetric=False, **GROUPS),
    "pack int8": compressed("pack-quantized", True, type="int", **ROWS),
    "pack int8 asym": compressed("pack-quantized", False, num_bits=8, symmetric=False, **GROUPS),
    "int8 rows": compressed("int-quantized", True, type="int", **ROWS),
    "fp8 rows": compressed("float-quantized", False, type="float", **ROWS),
    "modelopt": Case(
        "modelopt",
        lambda: packages.modelopt_fp8,
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        False,
    ),
    "nvfp4": Case(
        "compressed_tensors",
        lambda: packages.compressed_tensors_nvfp4,
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        False,
    ),
    "modelopt nvfp4": Case(
        "modelopt",
        lambda: packages.modelopt_nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_the_package_computes(
    checkpoint: Path, config: OmniConfig, tmp_path: Path, name: str
) -> None:
    """Bit for bit in float32, and in dtype int4 where it keeps the numbers."""
    case = CASES[name]
    reason = f"{case.package}, which packs matrices, is not installed"
    pytest.importorskip(case.package, reason=reason)
    writer = case.writer()
    quantised, widened = write_quantised_checkpoint(
        checkpoint, tmp_path, lambda n: writer if THINKER.fullmatch(n) else None, case.settings
    )
    theirs = load_file(widened / "model.safetensors")
    ours = Checkpoint(quantised)
    assert len(ours.quantised) == 84
    with ours.reader() as reader:
        for stored in ours.quantised:
            assert torch.equal(reader.tensor(stored), theirs[stored]), stored
    thinker = load_models(Checkpoint(widened), config, torch.float32, ("thinker",)).thinker
    kept = load_checkpoint_models(ours, config, "int4", STAGES, packed=False).thinker
    assert thinker is not None and kept is not None
    exact = dict(thinker.named_parameters())
    layers = r"decoder\.layers\..*(qkv\.weight|out\.weight|gate_up|down)"
    same = [
        torch.equal(tensor.float(), exact[parameter])
        for parameter, tensor in kept.named_parameters()
        if re.fullmatch(layers, parameter)
    ]
    assert len(same) == 12 and all(same) == case.kept
