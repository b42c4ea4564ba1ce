"""Writers of quantised matrices by the code of the packages that publish such checkpoints.

As in testing.quantised_checkpoint, but a package packs the numbers, and the weights returned are
those that it computes from its own tensors, with their scales widened to float32 first.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from testing.quantised_checkpoint import Grouped, Writer, Written


def auto_round(weight: Tensor) -> Written:
    """Write by auto-round's linear layers: "auto_round:auto_gptq", 4 bits in groups of 32."""
    from auto_round_extension.torch import qlinear_torch_zp

    out, into = weight.shape
    made = Grouped(weight, 4, 32, torch.float16)
    layer = qlinear_torch_zp.QuantLinear(4, 32, into, out, bias=False)
    layer.device = torch.device("cpu")  # as auto-round's export sets it
    layer.pack(_linear(made.weights), made.scales.float(), 8, device="cpu")
    tensors = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales")}
    layer.scales = layer.scales.float()
    return tensors, layer(torch.eye(into)).t()


def compressed_tensors(bits: int) -> Writer:
    """Return a writer by compressed-tensors' pack-quantized, with bfloat16 scales of 32 inputs."""

    def write(weight: Tensor) -> Written:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(
            num_bits=bits, type="int", strategy="group", group_size=32, symmetric=True
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        parts = weight.unflatten(1, (-1, 32))
        scale, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        tensors = compressor.compress({"weight": weight, "weight_scale": scale.bfloat16()}, scheme)
        exact = {**tensors, "weight_scale": tensors["weight_scale"].float()}
        return tensors, compressor.decompress(exact, scheme)["weight"]

    return write


def modelopt_fp8(weight: Tensor) -> Written:
    """Write static FP8 of a whole matrix by nvidia-modelopt; the scale of activations is any."""
    from modelopt.torch.quantization.qtensor import FP8QTensor

    made, scale = FP8QTensor.quantize(weight)
    tensors = {
        "weight": made._quantized_data,
        "weight_scale": scale.reshape(()),
        "input_scale": torch.tensor(0.5),
    }
    return tensors, made.dequantize(torch.float32, scale=scale)


def compressed_tensors_nvfp4(weight: Tensor) -> Written:
    """Write NVFP4 by compressed-tensors; W4A4."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
    args = scheme.weights
    whole = generate_gparam(weight.amin(), weight.amax())
    parts = weight.unflatten(1, (-1, args.group_size))
    scale, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=whole)
    stored = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    tensors = compressor.compress({**stored, "input_global_scale": torch.tensor([0.5])}, scheme)
    return tensors, compressed_tensors_nvfp4_weights(tensors, args)


def compressed_tensors_nvfp4_weights(tensors: Mapping[str, Tensor], args: Any) -> Tensor:
    """Return the weights of NVFP4 by compressed-tensors, its numbers unpacked as float32.

    Its compressor unpacks them as bfloat16. args: of the scheme's weights.
    """
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed = tensors["weight_packed"]
    out, half = packed.shape
    return dequantize(
        unpack_fp4_from_uint8(packed, out, 2 * half, dtype=torch.float32),
        tensors["weight_scale"].float(),
        args=args,
        dtype=torch.float32,
        global_scale=tensors["weight_global_scale"],
    )


def modelopt_nvfp4(weight: Tensor) -> Written:
    """Write NVFP4 by nvidia-modelopt; the scale of activations is any."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    made, scale, whole = NVFP4QTensor.quantize(weight.clone(), 16)
    tensors = {
        "weight": made._quantized_data,
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.5),
    }
    return tensors, modelopt_nvfp4_weights(made._quantized_data, scale, whole)


def modelopt_nvfp4_weights(packed: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
    """Return the weights of NVFP4 by nvidia-modelopt. whole: factor of all of them."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    out, half = packed.shape
    made = NVFP4QTensor(torch.Size((out, 2 * half)), torch.float32, packed)
    return made.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return layer
