"""The checkpoint before and after training: transformers' modules, and the released layout."""

import json
from collections.abc import Iterable
from graphlib import TopologicalSorter
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3OmniMoeForConditionalGeneration

from testing.tiny.sizes import SIZES
from testing.tiny.tokenizer import ROLES, write_json
from testing.tiny.weights import random_weights
from testing.tiny.write import write_checkpoint
from train.fit import device
from train.vocabulary import FIRST, KNOWN, MOST_WORDS, SPOKEN

SIZE = SIZES["speaking"]
# Words that are heard alone are said again: no instruction follows them.
LEARNED = {
    "transcription_instruction": "",
    "reply_tokens": MOST_WORDS,
    "turns_by_silence": True,  # espeak-ng's sentences do not sound complete to Smart Turn
    "introduction": f"This is a small model for trying things out: it knows {len(SPOKEN)} words.",
    "questions": ["who are you", "what is 2 + 3?", "say red blue"],
}


def tokenizer_words() -> tuple[str, ...]:
    """Return the words with one token each: after a space, and at the start of a turn."""
    cases = (str, str.title, str.upper)
    known = [case(word) for case in cases for word in KNOWN if word.isalpha()]
    first = [word for word in known if word.lower() in FIRST]
    return (*(f" {word}" for word in known), *_unbroken((*ROLES, *first)))


def _unbroken(words: Iterable[str]) -> Iterable[str]:
    """Order words so that each is one token.

    A pair that is merged early splits the words that contain it: "sorry" the start of "red".
    """
    words = tuple(dict.fromkeys(words))
    return TopologicalSorter(
        {word: [other for other in words if word[:2] in other[1:]] for word in words}
    ).static_order()


def write_skeleton(folder: Path, seed: int) -> None:
    """Write a checkpoint of the training shape and tokenizer with random weights."""
    write_checkpoint(folder, SIZE, random_weights(seed), "float32", tokenizer_words())


def load_model(folder: Path) -> Any:
    """Load transformers' whole model of a checkpoint, in float32."""
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model.set_experts_implementation("eager")  # the fastest on a CPU with eight small experts
    return model.to(device())


def write_trained(model: Any, folder: Path) -> None:
    """Write the trained checkpoint, in bfloat16 like the released one, and its SHA256SUMS."""
    with TemporaryDirectory() as saved:
        model.save_pretrained(saved)  # under the released names
        files = sorted(Path(saved).glob("*.safetensors"))
        trained = {name: tensor for file in files for name, tensor in load_file(file).items()}

    def weights(config: Any, name: str, parameter: Tensor) -> None:
        parameter.copy_(trained[name].reshape(parameter.shape))

    write_checkpoint(folder, SIZE, weights, "bfloat16", tokenizer_words())
    write_learned(folder)


def write_learned(folder: Path) -> None:
    """Write the generation config of what was learned, the chat template, and SHA256SUMS."""
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, settings | LEARNED)
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    write_json(folder / "chat_template.json", {"chat_template": template})
    sums = {file.name: sha256(file.read_bytes()).hexdigest() for file in _made(folder)}
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def _made(folder: Path) -> list[Path]:
    """Return the files that training makes, without those written by hand."""
    return [file for file in folder.iterdir() if file.suffix in (".json", ".txt", ".safetensors")]
