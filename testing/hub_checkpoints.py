"""Checkpoints of Qwen3-Omni on the hubs, as names, types and shapes of their tensors.

docs/options.md has their table, and test/unit/test_hub_checkpoints.py shows `inspect` headers made
from them. The forms are those that programs which write and run these checkpoints name.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.checkpoint.files import SINGLE_FILE
from qwen3_omni_neuron.checkpoint.released import INSTRUCT, SPEAKS, released_config_dict
from testing.tiny.weights import parameter_shapes

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of tensors by name."""
_BYTES = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}
_THINKING = "Qwen/Qwen3-Omni-30B-A3B-Thinking"
_LAYER = r"model\.layers\.\d+\.(self_attn|mlp|mlp\.experts\.\d+|mlp\.shared_expert)\.\w+_proj"
_THINKER = rf"thinker\.{_LAYER}"
_SPEECH = rf"talker\.{_LAYER}|talker\.code_predictor\.model\.layers\.\d+\.mlp\.\w+_proj"
_ENCODERS = r"thinker\.(audio_tower|visual)\.(?!pos_embed|patch_embed).*"


@dataclass(frozen=True)
class HubCheckpoint:
    """A checkpoint on a hub.

    layers: pattern of the layers that are quantised. parts: their tensors, by ending, for a matrix
    [out, into]. settings: quantization_config. kv_scales: with scales of a KV cache. base: the
    released checkpoint that it is made from. reported_gb: size of all its files, as people who have
    it report, None where it is not known.
    """

    layers: str = ""
    parts: Callable[[int, int], Tensors] = lambda _out, _into: {}
    settings: Mapping[str, Any] | None = None
    kv_scales: bool = False
    base: str = INSTRUCT
    reported_gb: float | None = None

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """Return the tensors that stand for weights of these shapes."""
        found: Tensors = {}
        for name, shape in shapes.items():
            layer = name.removesuffix(".weight")
            if layer == name or len(shape) != 2 or not re.fullmatch(self.layers, layer):
                found[name] = "BF16", shape
            else:
                parts = self.parts(*shape)
                found |= {f"{layer}.{ending}": part for ending, part in parts.items()}
                if self.kv_scales and layer.endswith((".k_proj", ".v_proj")):
                    found[f"{layer}.{layer[-6]}_scale"] = "F32", ()
        return found

    def write(self, folder: Path, layers: int | None = None) -> int:
        """Write config.json and a shard with holes for weights. Returns the bytes of its tensors.

        layers: number of the thinker's layers and of the talker's, None for the released ones.
        """
        config = released_config_dict(INSTRUCT)
        if layers is not None:
            for part in ("thinker_config", "talker_config"):
                config[part]["text_config"]["num_hidden_layers"] = layers
            config["talker_config"]["accept_hidden_layer"] = layers - 1
        parts = "" if SPEAKS[self.base] else "thinker."
        matrices = {n: s for n, s in parameter_shapes(config).items() if n.startswith(parts)}
        if parts:
            config["enable_audio_output"] = False
        if self.settings is not None:
            config["quantization_config"] = self.settings
        header: dict[str, Any] = {}
        shapes, end = [], 0
        for name, (dtype, shape) in self.tensors(matrices).items():
            begin, end = end, end + prod(shape) * _BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
            if name.endswith(".weight_shape"):
                shapes.append((begin, name.removesuffix("_shape")))
        written = json.dumps(header).encode()
        with (folder / SINGLE_FILE).open("wb") as file:
            file.write(len(written).to_bytes(8, "little") + written)
            for begin, name in shapes:
                file.seek(8 + len(written) + begin)
                file.write(b"".join(side.to_bytes(8, "little") for side in matrices[name]))
            file.truncate(8 + len(written) + end)  # takes no room on the disk
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return end


def _auto_round(out: int, into: int) -> Tensors:
    groups = into // 128
    return {
        "qweight": ("I32", (into // 8, out)),
        "qzeros": ("I32", (groups, out // 8)),
        "scales": ("F16", (groups, out)),
    }


def _gptq(out: int, into: int) -> Tensors:
    return {**_auto_round(out, into), "g_idx": ("I32", (into,))}


def _awq(out: int, into: int, bits: int) -> Tensors:
    return {
        "weight_packed": ("I32", (out, into * bits // 32)),
        "weight_scale": ("BF16", (out, into // 32)),
        "weight_shape": ("I64", (2,)),
    }


def _fp8(out: int, into: int) -> Tensors:
    blocks = -(-out // 128), -(-into // 128)
    return {"weight": ("F8_E4M3", (out, into)), "weight_scale_inv": ("F32", blocks)}


def _modelopt_fp8(out: int, into: int) -> Tensors:
    scale = "F32", ()
    return {"weight": ("F8_E4M3", (out, into)), "weight_scale": scale, "input_scale": scale}


def _modelopt_nvfp4(out: int, into: int) -> Tensors:
    return {
        "weight": ("U8", (out, into // 2)),
        "weight_scale": ("F8_E4M3", (out, into // 16)),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    }


def _nvfp4(out: int, into: int) -> Tensors:
    return {
        "weight_packed": ("U8", (out, into // 2)),
        "weight_scale": ("F8_E4M3", (out, into // 16)),
        "weight_global_scale": ("F32", (1,)),
        "input_global_scale": ("F32", (1,)),
    }


_AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4}
_GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "desc_act": False}
_COMPRESSED = {"quant_method": "compressed-tensors"}
_MODELOPT = {"quant_method": "modelopt"}


def _awq_checkpoint(bits: int, base: str, reported_gb: float) -> HubCheckpoint:
    weights = {"num_bits": bits, "group_size": 32}
    settings = {
        **_COMPRESSED,
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    return HubCheckpoint(
        _THINKER, partial(_awq, bits=bits), settings, base=base, reported_gb=reported_gb
    )


HUB_CHECKPOINTS = {
    **{
        hub_id: HubCheckpoint(base=hub_id, reported_gb=70.53 if speaks else 63.45)
        for hub_id, speaks in SPEAKS.items()
    },
    "cyankiwi/Qwen3-Omni-30B-A3B-Instruct-AWQ-4bit": _awq_checkpoint(4, INSTRUCT, 27.57),
    "cyankiwi/Qwen3-Omni-30B-A3B-Instruct-AWQ-8bit": _awq_checkpoint(8, INSTRUCT, 42.52),
    "cyankiwi/Qwen3-Omni-30B-A3B-Thinking-AWQ-4bit": _awq_checkpoint(4, _THINKING, 20.49),
    "cyankiwi/Qwen3-Omni-30B-A3B-Thinking-AWQ-8bit": _awq_checkpoint(8, _THINKING, 35.44),
    "Intel/Qwen3-Omni-30B-A3B-Instruct-int4-AutoRound": HubCheckpoint(
        _THINKER, _auto_round, {**_AUTO_ROUND, "group_size": 128, "sym": True}
    ),
    "thomasip/Qwen3-Omni-30B-A3B-Instruct-GPTQ-4bit": HubCheckpoint(
        _THINKER, _gptq, {**_GPTQ, "group_size": 128, "sym": True}, reported_gb=26.40
    ),
    "marksverdhei/Qwen3-Omni-30B-A3B-FP8": HubCheckpoint(
        f"{_THINKER}|{_SPEECH}",
        _fp8,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        reported_gb=37.39,
    ),
    "asdazd/Qwen3-Omni-30B-A3B-Instruct_modelopt_FP8": HubCheckpoint(
        _THINKER, _modelopt_fp8, {**_MODELOPT, "quant_algo": "FP8"}, kv_scales=True
    ),
    "shunyang90/Qwen3-Omni-30B-A3B-Instruct-NVFP4": HubCheckpoint(
        f"{_THINKER}|{_ENCODERS}", _modelopt_nvfp4, {**_MODELOPT, "quant_algo": "NVFP4"}
    ),
    "YihongJin/Qwen3-Omni-30B-A3B-Instruct-NVFP4-W4A4-full-thinker-awqclip": HubCheckpoint(
        _THINKER, _modelopt_nvfp4, {**_MODELOPT, "quant_algo": "NVFP4"}
    ),
    "NVFP4": HubCheckpoint(_THINKER, _nvfp4, {**_COMPRESSED, "format": "nvfp4-pack-quantized"}),
}
"""Checkpoints by hub id; "NVFP4" is any that llmcompressor writes by that scheme."""
