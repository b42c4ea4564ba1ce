"""Whole checkpoints that llmcompressor has written: read as compressed-tensors decompresses them.

`make test-quantised` runs these tests in the one environment that has llmcompressor.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.verification.oracle import Reference
from testing.package_writers import compressed_tensors_nvfp4_weights, modelopt_nvfp4_weights
from testing.quantised_by_packages import IGNORED, write_nvfp4
from testing.replies import assert_equal_replies

REASON = "llmcompressor, which packs matrices, is not installed"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {**INT4, "num_bits": 8}  # as cyankiwi's AWQ-8bit
Matrix = tuple[str, Tensor, dict[str, Tensor]]
"""A quantised matrix: its released name, our weights, and its tensors by ending."""


def written(checkpoint: Path, folder: Path, scheme: Any) -> Iterator[Matrix]:
    """Have llmcompressor write a checkpoint from its files alone. Yields its matrices."""
    import llmcompressor

    ignore = [*IGNORED, "re:.*embed_tokens"]
    llmcompressor.model_free_ptq(checkpoint, folder, scheme, ignore=ignore, device="cpu")
    return matrices(folder)


def matrices(folder: Path) -> Iterator[Matrix]:
    stored = tensors_of(folder)
    ours = Checkpoint(folder)
    assert len(ours.quantised) == 84
    with ours.reader() as reader:
        for name in ours.quantised:
            layer = name.removesuffix("weight")
            parts = {n.removeprefix(layer): t for n, t in stored.items() if n.startswith(layer)}
            yield name, reader.tensor(name), parts


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize(("form", "weights"), [("pack-quantized", INT4), ("pack-quantized", INT8)])
def test_weights_are_those_that_compressed_tensors_decompresses(
    checkpoint, tmp_path, form, weights
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


def test_weights_of_nvfp4_are_those_that_compressed_tensors_computes(checkpoint, tmp_path) -> None:
    """By the scheme NVFP4A16, in float32."""
    pytest.importorskip("llmcompressor", reason=REASON)
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    scheme = QuantizationScheme(targets=["Linear"], format="nvfp4-pack-quantized", **NVFP4A16)
    for name, ours, parts in written(checkpoint, tmp_path / "made", scheme):
        assert torch.equal(ours, compressed_tensors_nvfp4_weights(parts, scheme.weights)), name


def test_nvfp4_with_rounded_inputs_speaks_as_transformers_over_its_weights(
    checkpoint, tmp_path, capsys
) -> None:
    """By the scheme NVFP4, W4A4: shown, read as two packages do, and spoken without rounding.

    modelopt multiplies by the reciprocal of the factor by which compressed-tensors divides.
    """
    pytest.importorskip("llmcompressor", reason=REASON)
    pytest.importorskip("modelopt", reason="modelopt, which packs matrices, is not installed")
    from compressed_tensors.quantization.quant_scheme import NVFP4

    folder = write_nvfp4(checkpoint, tmp_path / "made")
    assert cli.main(["inspect", str(folder)]) == 0
    told = "input scales of 84 matrices are ignored: inputs are not rounded to them\n"
    assert told in capsys.readouterr().out
    widened = Path(shutil.copytree(checkpoint, tmp_path / "widened"))
    plain = {n: t.float() for n, t in tensors_of(checkpoint).items()}
    for name, ours, parts in matrices(folder):
        assert parts["input_global_scale"].isfinite() and parts["input_global_scale"] > 0
        plain[name] = compressed_tensors_nvfp4_weights(parts, NVFP4["weights"])
        assert torch.equal(ours, plain[name]), name
        whole = 1 / parts["weight_global_scale"]
        other = modelopt_nvfp4_weights(parts["weight_packed"], parts["weight_scale"], whole)
        torch.testing.assert_close(ours, other, rtol=2**-22, atol=0)
    for file in widened.glob("*.safetensors*"):
        file.unlink()
    save_file(plain, widened / "model.safetensors")
    assert_equal_replies(folder, Reference(widened))
