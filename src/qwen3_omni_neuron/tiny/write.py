"""Write a tiny checkpoint: configs, tokenizer and sharded safetensors with their index."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.tiny.shapes import SHAPES, TinyShape, config_dict, generation_config_dict
from qwen3_omni_neuron.tiny.tokenizer import WORDS, write_json, write_tokenizer
from qwen3_omni_neuron.tiny.weights import EOS_SCALE, parameter_shapes, random_parameter

Config = dict[str, Any]
Weights = Callable[[Config, str, tuple[int, ...]], torch.Tensor]

SHARDS = 4
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_tiny_checkpoint(
    folder: str | Path, seed: int = 0, size: str | TinyShape = "tiny", dtype: str = "bfloat16"
) -> Path:
    """Write a checkpoint of the released layout with random weights into `folder`.

    size: "tiny" (1.4 M parameters), "small" (155 M, the released head sizes), or other sizes.
    dtype: "bfloat16", as released, or "float32".
    The same seed gives the same bytes. Returns the folder.
    Raises OptionError for an unknown size or dtype, or a negative seed.
    """
    if isinstance(size, str) and size not in SHAPES:
        raise OptionError(f"size is one of {', '.join(SHAPES)}, got {size!r}.")
    if seed < 0:
        raise OptionError(f"seed is zero or more, got {seed}.")
    shape = SHAPES[size] if isinstance(size, str) else size
    return write_checkpoint(Path(folder), shape, random_weights(seed), dtype)


def write_checkpoint(
    folder: Path, shape: TinyShape, weights: Weights, dtype: str, words: Sequence[str] = WORDS
) -> Path:
    """Write a checkpoint of this shape with given weights; see `write_tiny_checkpoint`.

    weights: returns a parameter, given config.json, its released name and its shape. words: each is
    one token of the tokenizer.
    """
    if dtype not in DTYPES:
        raise OptionError(f"dtype is one of {', '.join(DTYPES)}, got {dtype!r}.")
    folder.mkdir(parents=True, exist_ok=True)
    token_ids = write_tokenizer(folder, words)
    config = config_dict(shape, token_ids, dtype)
    _write_shards(folder, config, weights, DTYPES[dtype])
    write_json(folder / "generation_config.json", generation_config_dict(token_ids))
    # Written last: a folder that has a config.json is a complete checkpoint.
    write_json(folder / "config.json", config)
    return folder


def random_weights(seed: int) -> Weights:
    """Return random weights from a seed; the model's replies don't end at once."""

    def weights(config: Config, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = random_parameter(name, shape, seed)
        if name == "thinker.lm_head.weight":
            tensor[config["im_end_token_id"]] *= EOS_SCALE
        elif name == "talker.codec_head.weight":
            tensor[config["talker_config"]["codec_eos_token_id"]] *= EOS_SCALE
        return tensor

    return weights


def _write_shards(folder: Path, config: Config, weights: Weights, dtype: torch.dtype) -> None:
    shapes = parameter_shapes(config)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(_split(list(shapes), SHARDS), start=1):
        file_name = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {n: weights(config, n, shapes[n]).to(dtype).contiguous() for n in names}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        total_bytes += sum(t.nbytes for t in tensors.values())
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def _split(names: list[str], parts: int) -> Iterator[list[str]]:
    size = -(-len(names) // parts)
    for start in range(0, len(names), size):
        yield names[start : start + size]
