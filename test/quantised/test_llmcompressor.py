"""Whole checkpoints that llmcompressor has written: read as compressed-tensors decompresses them.

`make test-quantised` runs these tests in the one environment that has llmcompressor.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen3_omni_neuron.checkpoint.files import Checkpoint
from testing.quantised_by_packages import IGNORED

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
INT8 = {**INT4, "num_bits": 8, "symmetric": True}  # as cyankiwi's AWQ-8bit
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize(
    ("form", "weights"),
    [("pack-quantized", INT4), ("pack-quantized", INT8), ("float-quantized", FP8)],
)
def test_weights_are_those_that_compressed_tensors_decompresses(
    checkpoint: Path, tmp_path: Path, form: str, weights: dict[str, Any]
) -> None:
    """Bit for bit, with the scales widened to float32 first. int4 has zero points."""
    reason = "llmcompressor, which writes the checkpoint, is not installed"
    llmcompressor = pytest.importorskip("llmcompressor", reason=reason)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    ignore = [*IGNORED, "re:.*embed_tokens"]
    folder = tmp_path / "made"
    llmcompressor.model_free_ptq(checkpoint, folder, scheme, ignore=ignore, device="cpu")
    stored = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    compressor = BaseCompressor.get_value_from_registry(form)
    ours = Checkpoint(folder)
    assert len(ours.quantised) == 84
    with ours.reader() as reader:
        for name in ours.quantised:
            layer = name.removesuffix("weight")
            parts = {n.removeprefix(layer): t for n, t in stored.items() if n.startswith(layer)}
            parts["weight_scale"] = parts["weight_scale"].float()
            theirs = compressor.decompress(parts, scheme)["weight"]
            assert torch.equal(reader.tensor(name), theirs.float()), name
