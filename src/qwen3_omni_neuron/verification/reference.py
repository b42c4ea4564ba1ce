"""The file of a reference's results: written, and read as a file from a stranger.

An npz file without pickles. `about` is JSON; the arrays of question 3 are `3/NAME`, and those of
its encoders and decoders with the weights of int8 `3/int8/NAME`:

    sound, picture                    what was asked, beside the text in `about`
    prompt, token_ids                 [S] of the prompt, [N] of the reply
    codes, uniforms                   [F, 16] of the reply, [F, 15] for the sampled codes
    audio, vision                     the encoders' rows, [A, H] and [levels, V, H]
    accepted                          the accept layer's rows of media, [A + V, H]
    layers                            the prompt's rows before the first layer of the thinker and
                                      after each, [1 + layers, rows, channels], some of both
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
from qwen3_omni_neuron.errors import ArtifactError, OutputError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.untrusted_files import parse_json, reason
from qwen3_omni_neuron.verification.questions import Question
from qwen3_omni_neuron.verification.rounded_weights import ROUNDED

Arrays = dict[str, NDArray[Any]]
FORMAT = 3
MOST_BYTES = 512 * 2**20
"""Most bytes of all arrays of a file, unpacked."""
MOST_QUESTIONS, MOST_TEXT = 64, 10_000
CHANNELS = 256
"""Most channels of an array that is only compared, and that no stage reads."""
LAYER_ROWS, LAYER_CHANNELS = 24, 32
"""Most rows and channels of each layer's hidden states."""
TOP_K = 50
"""Top-k of the sampled codes, whose top-p is 1."""

# Sizes by letter: the same letter is the same size in all arrays of a question.
_INPUTS = {
    **{"prompt": "S", "token_ids": "N", "codes": "FG", "uniforms": "Fg", "audio": "AH"},
    **{"vision": "LVH", "text_projection": "Rt", "hidden_projection": "Mt", "feedback": "FT"},
    "samples": "X",
}
_OUTPUTS = {
    **{"accepted": "MH", "layers": "lrc"},
    **{"thinker_logits": "Nv", "thinker_top": "N", "thinker_margins": "N"},
    **{"hidden": "FT", "talker_logits": "Fw", "talker_top": "F", "talker_margins": "F"},
    **{"greedy_codes": "FG", "greedy_margins": "Fg"},
    **{"sampled_codes": "FG", "sampled_margins": "Fg"},
}
_ENCODED = {name: _INPUTS[name] for name in ("audio", "vision")}
_ASKED = {"sound": "P", "picture": "yx3"}


@dataclass(frozen=True)
class About:
    """Origin of a reference. dtype: the dtype of its arithmetic. config: see `config_digest`."""

    config: str
    transformers: str
    dtype: str
    device: str
    format: int = FORMAT


@dataclass(frozen=True)
class ReferenceAnswer:
    """Results for one question.

    arrays: those that don't depend on a dtype, and those of the weights as stored. rounded: arrays
    of the encoders and decoders with the weights of a dtype, by its name.
    """

    question: Question
    arrays: Arrays
    rounded: Mapping[str, Arrays]


def spread(count: int, most: int = CHANNELS) -> NDArray[np.int64]:
    """Return the indices of those that are kept of `count` channels or rows: `most`, or all."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


def thinned_layers(states: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows and channels that are kept of hidden states [..., rows, channels]."""
    rows, width = states.shape[-2:]
    return states[..., spread(rows, LAYER_ROWS), :][..., spread(width, LAYER_CHANNELS)]


def text_rows(config: OmniConfig, token_ids: list[int], frames: int) -> list[int]:
    """Return the text token of each row of the talker: of the prompt's last, then one a frame.

    The reference leaves out the last token that it generated.
    """
    ids = [*token_ids[:-1], config.tts_eos_id]
    return (ids + [config.tts_pad_id] * frames)[: frames + 1]


def config_digest(folder: Path, adapters: Sequence[AdapterPath] = ()) -> str:
    """Return a sha256 of a checkpoint's config.json without its quantisation settings.

    With adapters it is of their digest, too.
    """
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
    """Read a reference, and check that it fits a checkpoint.

    Raises ArtifactError for a file that is not a reference, or one of another config.
    """
    try:
        arrays = _read_arrays(path)
        about, texts = _about(arrays.pop("about", None))
        if about.config != config_digest(folder, adapters):
            raise ArtifactError(
                f"{path} was written for a checkpoint with another config.json than {folder} has, "
                "or with other adapters. Name those that it was written for, or write a reference "
                f"of these: qwen3-omni-neuron verify --model {folder} --write reference.npz"
            )
        return about, [_answer(arrays, n, text, config) for n, text in enumerate(texts)]
    except _UnfitError as error:
        raise ArtifactError(
            f"{path} can't be read as a reference: {error}. Write it anew by "
            "qwen3-omni-neuron verify --write, with this version."
        ) from error


class _UnfitError(Exception):
    """A part of the file is not what a reference has."""


def _read_arrays(path: Path) -> Arrays:
    """Read all arrays of a file by name. Raises _UnfitError."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MOST_BYTES:
            raise _UnfitError(f"its arrays have {size} bytes, and {MOST_BYTES} are allowed")
        with np.load(path, allow_pickle=False) as file:
            # What begins as no array does is returned as bytes.
            return {name: np.asarray(file[name]) for name in file.files}
    except Exception as error:  # for one wrong byte zipfile, zlib and numpy raise many kinds
        raise _UnfitError(reason(error)) from error


def _about(found: NDArray[Any] | None) -> tuple[About, list[str]]:
    if found is None or found.shape != () or found.dtype.kind != "U":
        raise _UnfitError("it has no text 'about'")
    try:
        fields = parse_json(str(found).encode())
    except ValueError as error:
        raise _UnfitError(f"'about' can't be read: {reason(error)}") from error
    texts = fields.pop("questions", None) if isinstance(fields, dict) else None
    if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_QUESTIONS:
        raise _UnfitError(f"'about' names no questions, or more than {MOST_QUESTIONS}")
    if not all(isinstance(text, str) and len(text) <= MOST_TEXT for text in texts):
        raise _UnfitError(f"a question is not a text of at most {MOST_TEXT} characters")
    if fields.get("format") != FORMAT:
        raise _UnfitError(f"its format is {fields.get('format')!r}, this version reads {FORMAT}")
    expected = About.__annotations__
    if set(fields) != set(expected) or not all(
        isinstance(fields[name], str) and fields[name].isprintable()
        for name in expected
        if name != "format"
    ):
        raise _UnfitError(f"'about' has not the fields {', '.join(expected)}, of one line each")
    return About(**fields), texts


def _answer(arrays: Arrays, number: int, text: str, config: OmniConfig) -> ReferenceAnswer:
    sizes = _known_sizes(config)
    first = {name: _INPUTS[name] for name in ("prompt", "token_ids", "codes")}
    taken = _take(arrays, f"{number}/", first, sizes, config)
    if not (sizes["S"] and sizes["N"] and sizes["F"]):
        raise _UnfitError(f"question {number} has no prompt, no reply or no frame")
    assert config.code2wav is not None
    ids, frames, thinker = taken["prompt"], sizes["F"], config.thinker
    sizes["A"] = int((ids == thinker.audio_token_id).sum())
    sizes["M"] = int(np.isin(ids, thinker.media_token_ids).sum())
    sizes["V"] = sizes["M"] - sizes["A"]
    sizes |= {"R": frames + 1, "r": len(spread(sizes["S"], LAYER_ROWS))}
    sizes["X"] = frames * config.code2wav.frame_samples - config.code2wav.latency_samples
    taken |= _take(arrays, f"{number}/", _INPUTS | _OUTPUTS, sizes, config)
    rounded = {
        dtype: _take(arrays, f"{number}/{dtype}/", _OUTPUTS | _ENCODED, sizes, config)
        for dtype in ROUNDED
        if f"{number}/{dtype}/hidden" in arrays
    }
    asked = {n: shape for n, shape in _ASKED.items() if f"{number}/{n}" in arrays}
    given = _take(arrays, f"{number}/", asked, sizes, config)
    return ReferenceAnswer(Question(text, **given), taken, rounded)


def _known_sizes(config: OmniConfig) -> dict[str, int]:
    thinker, talker = config.thinker, config.talker
    if talker is None or config.code2wav is None:
        raise _UnfitError("the checkpoint can't speak, and a reference is of one that can")
    groups = config.code_groups
    kept = {
        "t": talker.text.hidden_size,
        "v": thinker.text.vocab_size,
        "w": talker.text.vocab_size,
    }
    return {
        "H": thinker.text.hidden_size,
        "T": talker.text.hidden_size,
        "L": 1 + len(thinker.vision.deepstack_layers),
        **{"G": groups, "g": groups - 1, "3": 3},
        "l": 1 + thinker.text.layers,
        "c": len(spread(thinker.text.hidden_size, LAYER_CHANNELS)),
        **{letter: len(spread(count)) for letter, count in kept.items()},
    }


def _take(
    arrays: Arrays,
    prefix: str,
    shapes: Mapping[str, str],
    sizes: dict[str, int],
    config: OmniConfig,
) -> Arrays:
    """Return the arrays of a prefix by name. sizes: known ones; filled with those that it finds."""
    found: Arrays = {}
    for name, letters in shapes.items():
        if (array := arrays.get(prefix + name)) is None:
            raise _UnfitError(f"it lacks the array {prefix}{name}")
        expected = tuple(sizes.get(letter, -1) for letter in letters)
        shape = array.shape
        if len(shape) != len(expected) or any(
            e not in (-1, n) for e, n in zip(expected, shape, strict=False)
        ):
            raise _UnfitError(f"{prefix}{name} has the shape {shape}, not {expected} (-1: any)")
        sizes.update(zip(letters, shape, strict=True))
        if limit := _limit(name, config):
            right = (array.dtype.kind in "iu" and array.size == 0) or _within(array, limit)
        else:
            right = array.dtype == np.float32 and bool(np.isfinite(array).all())
        if not right:
            raise _UnfitError(f"{prefix}{name} ({array.dtype}) has numbers that it can't have")
        found[name] = array.astype(np.int64) if limit and name != "picture" else array
    return found


def _limit(name: str, config: OmniConfig) -> int:
    """Return what the integers of an array are below; 0: it has floats."""
    assert config.talker is not None
    if name in ("prompt", "token_ids", "thinker_top"):
        return config.thinker.text.vocab_size
    if name in ("codes", "greedy_codes", "sampled_codes"):
        return config.talker.predictor.vocab_size
    return {"talker_top": config.talker.text.vocab_size, "picture": 256}.get(name, 0)


def _within(array: NDArray[Any], limit: int) -> bool:
    return array.dtype.kind in "iu" and bool(array.min() >= 0 and array.max() < limit)
