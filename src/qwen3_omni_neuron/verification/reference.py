"""The file of a reference's results.

An npz file without pickles. `about` is JSON; the arrays of question 3 are `3/NAME`, and those of
its encoders and decoders with the weights of int8 `3/int8/NAME`:

    sound, picture                    what was asked, beside the text in `about`
    prompt, token_ids                 [S] of the prompt, [N] of the reply
    codes, uniforms                   [F, 16] of the reply, [F, 15] for the sampled codes
    audio, vision                     the encoders' rows, [A, H] and [levels, V, H]
    accepted                          the accept layer's rows of media, [A + V, H]
    text_projection                   rows of the talker's text tokens, [F + 1, channels]
    hidden_projection                 rows of media, [A + V, channels]
    hidden, feedback                  the talker's, of each frame, [F, T]
    NAME_logits, NAME_top             of thinker [N] and talker [F]: some channels, the likeliest
    NAME_codes                        greedy and sampled, of the code predictor [F, 16]
    NAME_margins                      how sure these ids are: see verification.forced
    samples                           of code2wav
"""

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath, adapters_digest
from qwen3_omni_neuron.checkpoint.json_files import reason
from qwen3_omni_neuron.errors import ArtifactError, OutputError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.verification.questions import Question
from qwen3_omni_neuron.verification.rounded_weights import ROUNDED

Arrays = dict[str, NDArray[Any]]
FORMAT = 4
CHANNELS = 256
"""Most channels of an array that is only compared, and that no stage reads."""
TOP_K = 50
"""Top-k of the sampled codes, whose top-p is 1."""


@dataclass(frozen=True)
class About:
    """Origin of a reference. config: see `config_digest`."""

    config: str
    transformers: str
    dtype: str
    device: str
    format: int = FORMAT


@dataclass(frozen=True)
class ReferenceAnswer:
    """Results for one question. rounded: of other weights, by their dtype."""

    question: Question
    arrays: Arrays
    rounded: Mapping[str, Arrays]


def spread(count: int) -> NDArray[np.int64]:
    """Return the indices of the channels that are kept of `count`."""
    return np.linspace(0, count - 1, min(count, CHANNELS)).astype(np.int64)


def text_rows(config: OmniConfig, token_ids: list[int], frames: int) -> list[int]:
    """Return the text token of each row of the talker, but the last generated one."""
    ids = [*token_ids[:-1], config.tts_eos_id]
    return (ids + [config.tts_pad_id] * frames)[: frames + 1]


def config_digest(folder: Path, adapters: Sequence[AdapterPath] = ()) -> str:
    """Return a sha256 of a checkpoint's config.json, without its quantisation, and of adapters."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in ("quantization_config", "transformers_version", "_name_or_path"):
        config.pop(name, None)
    if adapters:
        config["adapters"] = adapters_digest(adapters)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def save_reference(path: Path, about: About, answers: Sequence[ReferenceAnswer]) -> None:
    """Write a reference. Raises OutputError."""
    texts = [answer.question.text for answer in answers]
    arrays: Arrays = {"about": np.array(json.dumps({**asdict(about), "questions": texts}))}
    for number, answer in enumerate(answers):
        asked = {"sound": answer.question.sound, "picture": answer.question.picture}
        parts = {"": {k: v for k, v in asked.items() if v is not None} | answer.arrays}
        parts |= {f"{dtype}/": of_dtype for dtype, of_dtype in answer.rounded.items()}
        for prefix, part in parts.items():
            arrays |= {f"{number}/{prefix}{name}": array for name, array in part.items()}
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error}. Name another file.") from error


def read_reference(
    path: Path, folder: Path, config: OmniConfig, adapters: Sequence[AdapterPath] = ()
) -> tuple[About, list[ReferenceAnswer]]:
    """Read a reference. Raises ArtifactError if it is none, or one of another config."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        fields = json.loads(str(arrays.pop("about")))
        texts = fields.pop("questions")
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']}, this version reads {FORMAT}")
        about = About(**fields)
        answers = [_answer(arrays, number, text) for number, text in enumerate(texts)]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ArtifactError(
            f"{path} can't be read as a reference: {reason(error)}. Write it again: "
            "qwen3-omni-neuron verify --write"
        ) from error
    if about.config != config_digest(folder, adapters):
        raise ArtifactError(
            f"{path} was written for a checkpoint with another config.json than {folder} has, or "
            "with other adapters. Pass those, or write a reference of these: qwen3-omni-neuron "
            f"verify --model {folder} --write reference.npz"
        )
    return about, answers


def _answer(arrays: Arrays, number: int, text: str) -> ReferenceAnswer:
    parts: dict[str, Arrays] = {name: {} for name in ("", *ROUNDED)}
    for name, array in arrays.items():
        question, *dtype, kind = name.split("/")
        if question == str(number):
            parts[dtype[0] if dtype else ""][kind] = array
    own = parts.pop("")
    asked = {kind: own.pop(kind) for kind in ("sound", "picture") if kind in own}
    return ReferenceAnswer(Question(text, **asked), own, {n: a for n, a in parts.items() if a})
