"""Write a tiny checkpoint: configs, tokenizer and sharded safetensors with their index."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from qwen3_omni_neuron.checkpoint.drawn import DRAWN_FILE
from testing.tiny.outlier import outlier_weights, with_outlier_layers
from testing.tiny.sizes import SIZES, Size, config_dict, generation_config_dict
from testing.tiny.tokenizer import WORDS, write_json, write_tokenizer
from testing.tiny.weights import Config, Weights, drawing, parameter_shapes, random_weights

Shapes = Mapping[str, tuple[int, ...]]

LEAST_SHARDS = 4
SHARD_BYTES = 700 * 10**6  # largest shard; one shard is in memory at a time
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_tiny_checkpoint(
    folder: str | Path,
    seed: int = 0,
    size: str | Size = "tiny",
    dtype: str = "bfloat16",
    drawn: bool = False,
    outlier: bool = False,
) -> Path:
    """Write a checkpoint of the released layout with random weights into `folder`.

    size: "tiny" (1.4 M parameters), "small" (155 M, the released head sizes), "wide" (2.7 G, every
    released width, fewer layers), "released" (35 G), "speaking" (6 M, the shape of the checkpoint
    that ships), or settings of your own.
    dtype: "bfloat16", as released, or "float32". drawn: write no weights; whoever reads one draws
    it from the seed (checkpoint.drawn). outlier: with the activations that were published for the
    real code predictor (testing.tiny.outlier), which gets five layers, as released. The same
    seed gives the same bytes. Returns the folder.
    """
    settings = SIZES[size] if isinstance(size, str) else size
    if outlier:
        assert not drawn, "the outlier changes weights that are written"
        settings = with_outlier_layers(settings)
        return write_checkpoint(Path(folder), settings, outlier_weights(seed), dtype)
    return write_checkpoint(Path(folder), settings, seed if drawn else random_weights(seed), dtype)


def write_checkpoint(
    folder: Path, size: Size, weights: Weights | int, dtype: str, words: Sequence[str] = WORDS
) -> Path:
    """Write a checkpoint of this size with given weights; see `write_tiny_checkpoint`.

    weights: function that fills a parameter, given config.json, its released name and the tensor;
    or a seed, from which they are drawn when they are read.
    words: each becomes one token of the tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token_ids = write_tokenizer(folder, words)
    config = config_dict(size, token_ids, dtype)
    if isinstance(weights, int):
        shapes = parameter_shapes(config).items()
        tensors = {name: (shape, *drawing(config, name, shape)) for name, shape in shapes}
        drawn = {"dtype": dtype, "seed": weights, "tensors": tensors}
        (folder / DRAWN_FILE).write_text(json.dumps(drawn))
    else:
        _write_shards(folder, config, weights, DTYPES[dtype])
    write_json(folder / "generation_config.json", generation_config_dict(token_ids))
    # Written last: a folder that has a config.json is a complete checkpoint.
    write_json(folder / "config.json", config)
    return folder


def _write_shards(folder: Path, config: Config, weights: Weights, dtype: torch.dtype) -> None:
    shapes = parameter_shapes(config)
    shards = list(_split(shapes, dtype.itemsize))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: torch.empty(shapes[name], dtype=dtype) for name in names}
        for name, tensor in tensors.items():
            weights(config, name, tensor)
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
    total_bytes = sum(map(prod, shapes.values())) * dtype.itemsize
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def _split(shapes: Shapes, value_bytes: int) -> Iterator[list[str]]:
    """Yield the names of each shard: at most a quarter of them, and SHARD_BYTES together."""
    most_names = -(-len(shapes) // LEAST_SHARDS)
    names: list[str] = []
    shard_bytes = 0
    for name, shape in shapes.items():
        nbytes = prod(shape) * value_bytes
        if names and (len(names) == most_names or shard_bytes + nbytes > SHARD_BYTES):
            yield names
            names, shard_bytes = [], 0
        names.append(name)
        shard_bytes += nbytes
    yield names
