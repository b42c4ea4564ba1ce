"""Whole quantised checkpoints written by packages: the thinker's matrices, as published ones have.

compressed-tensors 0.12 writes over transformers 4.57's model, auto-round 0.16 from the files alone,
llmcompressor 0.14 over transformers 5's model.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

IGNORED = [
    r"re:.*mlp\.gate$",
    "thinker.lm_head",
    r"re:thinker\.(audio_tower|visual).*",
    "re:talker.*",
    "re:code2wav.*",
]
_AUTO_ROUND = """
import sys
from auto_round import AutoRound
if __name__ == "__main__":
    model, to, scheme = sys.argv[1:]
    made = AutoRound(model=model, scheme=scheme, iters=0, disable_opt_rtn=True, group_size=32,
        ignore_layers="talker")
    made.quantize_and_save(format="auto_round", output_dir=to)
"""


def write_compressed_tensors(checkpoint: Path, to: Path, form: str, **weights: Any) -> Path:
    """Write a checkpoint with compressed-tensors. Returns its folder.

    form: format of the package. weights: fields of the scheme's weights.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16)
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"format": form, "ignore": IGNORED, "config_groups": groups}
    apply_quantization_config(model, QuantizationConfig.model_validate(settings))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        args = module.quantization_scheme.weights
        weight = module.weight.float()
        parts = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        if args.strategy == "tensor":
            parts = weight.view(1, -1)
        scale, zero_point = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):  # which the package leaves out where all are 0
            module.weight_zero_point.data.copy_(zero_point)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    model.save_pretrained(to)
    compressor.update_config(to)
    return _with_other_files(checkpoint, to)


def write_auto_round(checkpoint: Path, to: Path) -> Path:
    """Write a checkpoint with auto-round, W4A16, in groups of 32. Returns its folder.

    It runs in a process of its own, since it starts others.
    """
    command = [sys.executable, "-c", _AUTO_ROUND, str(checkpoint), str(to), "W4A16"]
    subprocess.run(command, check=True, capture_output=True)
    return _with_other_files(checkpoint, to)


def write_nvfp4(checkpoint: Path, to: Path) -> Path:
    """Write a checkpoint of NVFP4, W4A4, with llmcompressor. Returns its folder.

    The scales of inputs are those of four texts of random tokens.
    """
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.forward = model.thinker.forward  # it has none, and calibrating calls it
    generator = torch.Generator().manual_seed(0)
    texts: Any = [
        {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        for ids in torch.randint(0, 256, (4, 32), generator=generator)
    ]
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(checkpoint),
        dataset=DataLoader(texts, batch_size=None),
        recipe=QuantizationModifier(targets="Linear", scheme="NVFP4", ignore=IGNORED),
        pipeline="basic",
        output_dir=str(to),
    )
    return _with_other_files(checkpoint, to)


def _with_other_files(checkpoint: Path, to: Path) -> Path:
    """Copy what a package leaves out: the tokenizer's files."""
    for path in checkpoint.iterdir():
        if "safetensors" not in path.name and not (to / path.name).exists():
            shutil.copy(path, to / path.name)
    return to
