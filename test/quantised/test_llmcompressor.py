"""Whole checkpoints that llmcompressor has written: read as compressed-tensors decompresses them.

`make test-quantised` runs these tests in the one environment that has llmcompressor.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from testing.package_writers import compressed_tensors_nvfp4_weights
from testing.quantised_by_packages import IGNORED

REASON = "llmcompressor, which writes the checkpoint, is not installed"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
INT8 = {**INT4, "num_bits": 8, "symmetric": True}  # as cyankiwi's AWQ-8bit
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def written(
    checkpoint: Path, folder: Path, scheme: Any
) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """Have llmcompressor write a checkpoint. Yields each matrix: name, our weights, its tensors."""
    import llmcompressor

    ignore = [*IGNORED, "re:.*embed_tokens"]
    llmcompressor.model_free_ptq(checkpoint, folder, scheme, ignore=ignore, device="cpu")
    stored = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    ours = Checkpoint(folder)
    assert len(ours.quantised) == 84
    with ours.reader() as reader:
        for name in ours.quantised:
            layer = name.removesuffix("weight")
            parts = {n.removeprefix(layer): t for n, t in stored.items() if n.startswith(layer)}
            yield name, reader.tensor(name), parts


@pytest.mark.parametrize(
    ("form", "weights"),
    [("pack-quantized", INT4), ("pack-quantized", INT8), ("float-quantized", FP8)],
)
def test_weights_are_those_that_compressed_tensors_decompresses(
    checkpoint: Path, tmp_path: Path, form: str, weights: dict[str, Any]
) -> None:
    """Bit for bit, with the scales widened to float32 first. int4 has zero points."""
    pytest.importorskip("llmcompressor", reason=REASON)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    for name, ours, parts in written(checkpoint, tmp_path / "made", scheme):
        parts["weight_scale"] = parts["weight_scale"].float()
        assert torch.equal(ours, compressor.decompress(parts, scheme)["weight"].float()), name


def test_weights_of_nvfp4_are_those_that_compressed_tensors_computes(
    checkpoint: Path, tmp_path: Path
) -> None:
    """By the scheme NVFP4A16, in float32. NVFP4 needs data for its scales of activations."""
    pytest.importorskip("llmcompressor", reason=REASON)
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    scheme = QuantizationScheme(targets=["Linear"], format="nvfp4-pack-quantized", **NVFP4A16)
    for name, ours, parts in written(checkpoint, tmp_path / "made", scheme):
        assert torch.equal(ours, compressed_tensors_nvfp4_weights(parts, scheme.weights)), name
