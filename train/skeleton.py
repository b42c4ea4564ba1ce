"""The checkpoint before and after training: transformers' modules in, the released layout out."""

from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3OmniMoeForConditionalGeneration

from qwen3_omni_neuron.tiny.write import random_weights, write_checkpoint
from train.fit import device
from train.shape import SHAPE
from train.world import SAY, SPOKEN, SUM

# What stands at the start of a reply or a request, in an order that leaves each of them whole: a
# pair that is merged early hides the words that have it in their middle ("sorry" has the start of
# "red" in it).
_STARTS = (
    *("please", "Please", "ethan", "sorry", "user", "assistant", "chelsie", "goodbye", "system"),
    *("orange", "yellow", "seven", "hello", "white", "three", "green", "black", "eight", "aiden"),
    *("blue", "Plus", "zero", "four", "What", "what", "five", "plus", "nine", "Say", "one", "six"),
    *("red", "two", "yes", "say", "Is", "is", "no"),
)


def tokenizer_words() -> tuple[str, ...]:
    """One token each, after a space, at the start of a reply, and at that of a request."""
    asked = dict.fromkeys(" ".join((*SAY, *SUM, "plus")).split())
    return (*(f" {word}" for word in (*SPOKEN, *asked)), *_STARTS)


def write_skeleton(folder: Path, seed: int) -> None:
    """A checkpoint of this world's shape and tokenizer with random weights, to start from."""
    write_checkpoint(folder, SHAPE, random_weights(seed), "float32", tokenizer_words())


def load_model(folder: Path) -> Any:
    """transformers' whole model of a checkpoint, in float32."""
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model.set_experts_implementation("eager")  # with eight little experts the fastest on a CPU
    return model.to(device())


def write_trained(model: Any, folder: Path) -> None:
    """The trained checkpoint, in bfloat16 as the released one is, and its SHA256SUMS."""
    with TemporaryDirectory() as saved:
        model.save_pretrained(saved)  # under the released names
        files = sorted(Path(saved).glob("*.safetensors"))
        trained = {name: tensor for file in files for name, tensor in load_file(file).items()}

    def weights(config: Any, name: str, shape: tuple[int, ...]) -> Tensor:
        return trained[name].reshape(shape)

    write_checkpoint(folder, SHAPE, weights, "bfloat16", tokenizer_words())
    sums = {file.name: sha256(file.read_bytes()).hexdigest() for file in _made(folder)}
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def _made(folder: Path) -> list[Path]:
    """What training has made: all but what is written by hand."""
    return [file for file in folder.iterdir() if file.suffix in (".json", ".txt", ".safetensors")]
