"""Arguments of the verbs that load a model: its checkpoint, and how to load it."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.checkpoint import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.errors import OptionError, format_value
from qwen3_omni_neuron.options import LOAD_OPTIONS, Option, RequestOptions

if TYPE_CHECKING:
    from qwen3_omni_neuron.events import ModelInfo

MODEL_VARIABLE = "QWEN3_OMNI_MODEL"
_NO_DEFAULT = "an error"
WHOLE_MODEL = "Qwen/Qwen3-Omni-30B-A3B-Instruct"


def add_model_arguments(parser: argparse.ArgumentParser, otherwise: str = _NO_DEFAULT) -> None:
    """Add --model, and the flags of a load that every verb has: see `options.option`.

    otherwise: see add_checkpoint_argument.
    """
    group = parser.add_argument_group("the model")
    add_checkpoint_argument(group, otherwise)
    for option in LOAD_OPTIONS.values():
        if option.loads:
            add_option(group, option, option.default)


def add_option(parser: argparse._ActionsContainer, option: Option, default: Any = None) -> None:
    """Add the flag of an option of a load or a request; --adapter may be given several times."""
    several = option.name == "adapters"
    parser.add_argument(
        option.flag,
        dest=option.name,
        action="append" if several else "store",
        type=adapter if several else partial(option_value, option),
        default=None if several else default,
        metavar=option.metavar or option.value_type.__name__.upper(),
        choices=None if option.values is None else option.values.limits.get("enum"),
        help=f"{option.help}{'; repeatable' * several}; default: {option.default_text}",
    )


def option_value(option: Option, text: str) -> Any:
    """Return the value of an option's flag. Raises ArgumentTypeError for one that it can't have."""
    kind, values = option.value_type, option.values
    parse = _PARSERS.get(option.name) or (boolean if kind is bool else kind)
    try:
        value = parse(text)
        option.check(value)
    except (OptionError, ValueError):
        words = values.phrase if values else f"of type {kind.__name__}"
        raise argparse.ArgumentTypeError(f"must be {words}, got {format_value(text)}") from None
    return value


def add_checkpoint_argument(
    parser: argparse._ActionsContainer, otherwise: str = _NO_DEFAULT
) -> None:
    """Add --model. otherwise: help text for the default where the environment sets none."""
    parser.add_argument(
        "--model",
        default=os.environ.get(MODEL_VARIABLE),
        metavar="PATH",
        help=f"checkpoint folder or hub id; default: ${MODEL_VARIABLE}, or else {otherwise}",
    )


def model_or_shipped(parsed: argparse.Namespace) -> str:
    """Return the checkpoint that was named, or the one that ships. Errors: see `existing`."""
    return existing(parsed.model or str(SPEAKING_CHECKPOINT))


def existing(model: str) -> str:
    """Return a checkpoint's folder or hub id. Raises CheckpointError if it can be neither.

    Verbs call it before they import torch, which takes a second.
    """
    from qwen3_omni_neuron.checkpoint.files import local_folder

    local_folder(model)
    return model


def check_speaker(model: str, speaker: str | None) -> None:
    """Check a speaker by config.json, before a model is loaded. Raises OptionError.

    model: a folder or a hub id; of one that is not released nothing is fetched, nor checked.
    """
    from qwen3_omni_neuron.checkpoint.config_json import read_config
    from qwen3_omni_neuron.checkpoint.files import local_folder
    from qwen3_omni_neuron.checkpoint.released import SPEAKS, open_config

    if local_folder(model) is None and model not in SPEAKS:
        return
    options = RequestOptions() if speaker is None else RequestOptions(speaker=speaker)
    with open_config(model) as folder:
        try:
            options.speaker_id(read_config(folder))
        except OptionError as error:
            raise OptionError(f"--speaker: {error}" if speaker else str(error)) from error


def introduce(info: "ModelInfo") -> None:
    """Print what the checkpoint says of itself, if anything, and how to get the whole model.

    Once for each text, and on a terminal alone. Files in the user's cache folder, whose names are
    hashes of the texts, remember them.
    """
    if info.introduction and sys.stderr.isatty():
        name = sha256(info.introduction.encode()).hexdigest()
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        seen = Path(cache, "qwen3-omni-neuron", "introductions", name).expanduser()
        with suppress(OSError):
            if seen.exists():
                return
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.touch()
        questions = ", ".join(f'"{question}"' for question in info.questions)
        asked = f" Ask it: {questions}." if questions else ""
        print(
            f"{info.introduction}{asked} The whole model: --model {WHOLE_MODEL}, in 24 GB "
            "of memory with --dtype int4.",
            file=sys.stderr,
            flush=True,
        )


def chosen_model(parsed: argparse.Namespace) -> str:
    """Return the checkpoint that was named. Raises OptionError where none was."""
    if not parsed.model:
        raise OptionError(f"no checkpoint: give --model PATH, or set {MODEL_VARIABLE}.")
    return parsed.model


def load_arguments(parsed: argparse.Namespace, slots: int) -> dict[str, Any]:
    """Return the keyword arguments of `Qwen3Omni.load`.

    slots: number of slots where neither a compiled tree nor a flag of the verb has another.
    """
    given = {n: value for n in LOAD_OPTIONS if (value := getattr(parsed, n, None)) is not None}
    return given if parsed.compiled_path else {"max_concurrency": slots} | given


def adapter(text: str) -> tuple[str, float]:
    """Parse "folder=0.5" into ("folder", 0.5); "folder" has the weight 1."""
    folder, _, weight = text.rpartition("=")
    try:
        given = (folder, float(weight)) if folder else (text, 1.0)
    except ValueError:  # the folder's own name has the sign
        given = (text, 1.0)
    try:
        LOAD_OPTIONS["adapters"].check([given])
    except OptionError:
        raise argparse.ArgumentTypeError(f"{text!r} has a weight that is no number") from None
    return given


def cores(text: str) -> dict[str, str]:
    """Parse "thinker=0-7,talker=8-15" into {"thinker": "0-7", "talker": "8-15"}."""
    found = dict(part.partition("=")[::2] for part in text.split(","))
    if not all(found.values()):
        raise argparse.ArgumentTypeError(f"{text!r} names no cores, such as thinker=0-7")
    return found


def sizes(text: str) -> list[int]:
    """Parse "1,2,8" into [1, 2, 8]."""
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        message = f"{text!r} is not a list of numbers, such as 1,2,8"
        raise argparse.ArgumentTypeError(message) from None


def boolean(text: str) -> bool:
    """Parse "true" or "false"."""
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


_PARSERS: Mapping[str, Callable[[str], Any]] = {"chunk_frames": sizes, "cores": cores}
