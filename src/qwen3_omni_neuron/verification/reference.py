"""The file of a reference's results, and its questions.

An npz file without pickles. `about` is JSON; question 3's arrays are `3/NAME`, and its encoders'
and decoders' with int8 weights `3/int8/NAME`:

    sound, picture                    what was asked, beside the text in `about`
    prompt, token_ids                 [S] of the prompt, [N] of the reply
    codes, seed                       [F, 16] of the reply, int: of the sampled codes' noise
    audio, vision                     the encoders' rows, [A, H] and [levels, V, H]
    accepted                          the accept layer's rows of media, [A + V, H]
    text_projection                   rows of the talker's text tokens, [F + 1, channels]
    hidden_projection                 rows of media, [A + V, channels]
    hidden, feedback                  the talker's, of each frame, [F, T]
    NAME_logits, NAME_top             of thinker [N] and talker [F]: some channels, the likeliest
    NAME_codes                        greedy and sampled, of the code predictor [F, 16]
    NAME_margins                      how sure these ids are: see logits_arrays, _predict
    samples                           of code2wav
"""

import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath, adapters_digest
from qwen3_omni_neuron.checkpoint.json_files import reason
from qwen3_omni_neuron.errors import ArtifactError, OutputError
from qwen3_omni_neuron.model.config import OmniConfig

Arrays = dict[str, NDArray[Any]]
FORMAT = 5
CHANNELS = 256
"""Most channels of an array that is only compared."""
TOP_K = 50
"""Top-k of the sampled codes, whose top-p is 1."""
SOUND_RATE = 16000
TEXTS = (
    "What is six plus two?",
    "What colour is the sky?",
    "Count from one to ten.",
    "Name three animals that can fly.",
    "Translate to French: good morning, my friend.",
    "Write one sentence about the sea.",
    "Which is larger, 9.11 or 9.9?",
    "Say: the quick brown fox jumps over the lazy dog.",
)
SPOKEN = ("What is six plus two?", "What colour is grass?")


@dataclass(frozen=True)
class Question:
    """A user's message.

    sound: float32 [samples] in [-1, 1] at SOUND_RATE. picture: uint8 [height, width, 3].
    """

    text: str = ""
    sound: NDArray[np.float32] | None = None
    picture: NDArray[np.uint8] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Its conversation."""
        content: list[dict[str, Any]] = []
        if self.sound is not None:
            content.append({"type": "audio", "audio": self.sound, "sampling_rate": SOUND_RATE})
        if self.picture is not None:
            content.append({"type": "image", "image": self.picture})
        if self.text:
            content.append({"type": "text", "text": self.text})
        return [{"role": "user", "content": content}]

    @property
    def title(self) -> str:
        """Short description."""
        parts = [kind for kind in ("sound", "picture") if getattr(self, kind) is not None]
        return " + ".join([*parts, repr(self.text)] if self.text else parts)


def make_questions() -> list[Question]:
    """Return twelve questions, spoken by the checkpoint that ships with the package."""
    import soxr

    from qwen3_omni_neuron.api import Qwen3Omni
    from qwen3_omni_neuron.checkpoint import SPEAKING_CHECKPOINT

    with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=1) as omni:
        replies = [omni.say(t, seed=n, talker_max_new_tokens=60) for n, t in enumerate(SPOKEN)]
    first, second = (
        soxr.resample(reply.audio, reply.sample_rate, SOUND_RATE).clip(-1, 1) for reply in replies
    )
    picture = draw_picture()
    return [
        Question(sound=first),
        Question("What is in the picture?", picture=picture),
        Question(sound=second, picture=picture),
        *(Question(text) for text in TEXTS),
        Question("Answer the question.", sound=second),
    ]


def draw_picture() -> NDArray[np.uint8]:
    """Draw a red disc over a gradient, uint8 [96, 128, 3]."""
    rows, columns = np.mgrid[:96, :128]
    picture = np.stack((rows * 2, columns, 255 - columns), -1).astype(np.uint8)
    picture[(rows - 48) ** 2 + (columns - 64) ** 2 < 900] = (220, 30, 30)
    return picture


@dataclass(frozen=True)
class SavedReference:
    """A reference's results, and their origin.

    config: see `config_digest`. answers: each question, with arrays by name.
    """

    config: str
    transformers: str
    dtype: str
    device: str
    answers: list[tuple[Question, Arrays]]

    def save(self, path: Path) -> None:
        """Write the reference's file. Raises OutputError."""
        about = {name: value for name, value in vars(self).items() if name != "answers"}
        about |= {"format": FORMAT, "questions": [question.text for question, _ in self.answers]}
        arrays: Arrays = {"about": np.array(json.dumps(about))}
        for number, (question, results) in enumerate(self.answers):
            asked = {"sound": question.sound, "picture": question.picture, **results}
            arrays |= {f"{number}/{name}": a for name, a in asked.items() if a is not None}
        try:
            with path.open("wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        except OSError as error:
            raise OutputError(f"{path} can't be written: {error}. Name another file.") from error


def read_reference(
    path: Path, folder: Path, adapters: Sequence[AdapterPath] = ()
) -> SavedReference:
    """Read a reference. Raises ArtifactError for other files or another config."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        if (written := about.pop("format")) != FORMAT:
            raise ValueError(f"its format is {written}, this version reads {FORMAT}")
        answers = []
        for number, text in enumerate(about.pop("questions")):
            own = below(arrays, f"{number}/")
            answers.append((Question(text, own.get("sound"), own.get("picture")), own))
        reference = SavedReference(**about, answers=answers)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ArtifactError(
            f"{path} can't be read as a reference: {reason(error)}. Write it again: "
            "qwen3-omni-neuron verify --write"
        ) from error
    if reference.config != config_digest(folder, adapters):
        raise ArtifactError(
            f"{path} was written for a checkpoint with another config.json than {folder} has, or "
            "with other adapters. Pass those, or write a reference of these: qwen3-omni-neuron "
            f"verify --model {folder} --write reference.npz"
        )
    return reference


def below(arrays: Arrays, prefix: str) -> Arrays:
    """Return the arrays whose names have a prefix, without it."""
    return {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}


def config_digest(folder: Path, adapters: Sequence[AdapterPath] = ()) -> str:
    """Return a sha256 of a checkpoint's config.json, without quantisation, and of adapters."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in ("quantization_config", "transformers_version", "_name_or_path"):
        config.pop(name, None)
    if adapters:
        config["adapters"] = adapters_digest(adapters)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def text_rows(config: OmniConfig, token_ids: list[int], frames: int) -> list[int]:
    """Return the text tokens of the talker's rows, except the last generated one."""
    ids = [*token_ids[:-1], config.tts_eos_id]
    return (ids + [config.tts_pad_id] * frames)[: frames + 1]


def logits_arrays(name: str, logits: Tensor) -> Arrays:
    """Return some channels of logits [N, vocab], the likeliest tokens, and their margins.

    A margin is the likeliest logit's distance from the next, in the row's deviations.
    """
    logits = logits.float()
    first, second = logits.topk(2).values.unbind(-1)
    margins, top = (first - second) / logits.std(-1), logits.argmax(-1)
    arrays = {"top": top.cpu().numpy(), "margins": as_array(margins)}
    return {
        f"{name}_logits": thinned(logits),
        **{f"{name}_{kind}": a for kind, a in arrays.items()},
    }


def thinned(x: Tensor) -> NDArray[np.float32]:
    """Return at most CHANNELS channels, evenly spaced, of rows [..., channels]."""
    count = x.shape[-1]
    kept = np.linspace(0, count - 1, min(count, CHANNELS)).astype(np.int64)
    return as_array(x[..., torch.from_numpy(kept).to(x.device)])


def as_array(x: Tensor) -> NDArray[np.float32]:
    """Return a tensor as an array."""
    array: NDArray[np.float32] = x.float().cpu().numpy()
    return array
