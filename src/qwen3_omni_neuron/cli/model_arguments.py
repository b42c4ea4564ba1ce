"""Arguments of the verbs that load a model."""

import argparse
import os
import sys
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from qwen3_omni_neuron.checkpoint import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.errors import OptionError, format_value
from qwen3_omni_neuron.options import LOAD_OPTIONS, Option, RequestOptions

if TYPE_CHECKING:
    from qwen3_omni_neuron.events import ModelInfo

MODEL_VARIABLE = "QWEN3_OMNI_MODEL"
_NO_DEFAULT = "required"
SHIPPED = "the shipped demo"
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
WHOLE_MODEL = "Qwen/Qwen3-Omni-30B-A3B-Instruct"


def add_model_arguments(
    parser: argparse._ActionsContainer,
    otherwise: str = _NO_DEFAULT,
    group: argparse._ActionsContainer | None = None,
) -> None:
    """Add --model, and the flags of every load to a group, by default a new "Engine".

    otherwise: see add_checkpoint_argument.
    """
    add_checkpoint_argument(parser, otherwise)
    group = group or parser.add_argument_group("Engine")
    for option in LOAD_OPTIONS.values():
        if option.loads:
            add_option(group, option, option.default)


def add_option(
    parser: argparse._ActionsContainer, option: Option, default: Any = None, **given: Any
) -> None:
    """Add an option's flag, repeatable for a list. given: other arguments."""
    several = option.default == ()
    kind = option.value_type
    usual = "N" if kind in (int, float) else "N,N,..." if _has_sizes(option) else kind.__name__
    arguments: dict[str, Any] = {
        "dest": option.name,
        "action": "append" if several else "store",
        "type": partial(option_value, option),
        "default": None if several else default,
        "metavar": option.metavar or usual.upper(),
        "choices": None if option.values is None else option.values.limits.get("enum"),
        "help": f"{option.help}{'; repeatable' * several}; default: {option.default_text}",
    }
    parser.add_argument(option.flag, **arguments | given)


def option_value(option: Option, text: str) -> Any:
    """Return the value of an option's flag. Raises ArgumentTypeError."""
    try:
        if option.name == "adapters":
            return option.converted([_adapter(text)])[0]
        if option.default == ():
            return option.converted([text])[0]
        return option.converted(_parsed(option, text))
    except (OptionError, ValueError, KeyError):
        values, kind = option.values, option.value_type
        words = values.phrase if values else f"of type {kind.__name__}"
        raise argparse.ArgumentTypeError(f"must be {words}, got {format_value(text)}") from None


def _parsed(option: Option, text: str) -> Any:
    kind = option.value_type
    if kind is bool:
        return _TRUTH[text.lower()]
    if option.name == "cores":  # thinker=0-7,talker=8-15
        found = dict(part.partition("=")[::2] for part in text.split(","))
        if not all(found.values()):
            raise ValueError
        return found
    if _has_sizes(option):
        return [int(size) for size in text.split(",")]
    if kind in (int, float):
        return int(text) if text.isdecimal() else float(text)
    return text


def _has_sizes(option: Option) -> bool:
    return get_args(option.value_type)[:1] == (int,)


def _adapter(text: str) -> tuple[str, float]:
    """Parse "folder=0.5" into ("folder", 0.5); "folder" has the weight 1."""
    folder, _, weight = text.rpartition("=")
    try:
        return (folder, float(weight)) if folder else (text, 1.0)
    except ValueError:  # the sign is in the folder's name
        return text, 1.0


def add_checkpoint_argument(
    parser: argparse._ActionsContainer, otherwise: str = _NO_DEFAULT
) -> None:
    """Add --model. otherwise: help text for the default if the environment has none."""
    parser.add_argument(
        "--model",
        default=os.environ.get(MODEL_VARIABLE),
        metavar="PATH",
        help=f"checkpoint folder or hub id; default: ${MODEL_VARIABLE}, else {otherwise}",
    )


def model_or_shipped(parsed: argparse.Namespace) -> str:
    """Return the named checkpoint, or the shipped one. Errors: see `existing`."""
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

    model: a folder or a hub id; unreleased hub ids are not fetched, nor checked.
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
    """Print the checkpoint's introduction, if any, and how to get the whole model.

    Only on a terminal, and once per text: the user's cache folder keeps a hash of each text.
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
    """Return the named checkpoint. Raises OptionError without one."""
    if not parsed.model:
        raise OptionError(f"no checkpoint: give --model PATH, or set {MODEL_VARIABLE}.")
    return parsed.model


def load_arguments(parsed: argparse.Namespace, slots: int) -> dict[str, Any]:
    """Return the keyword arguments of `Qwen3Omni.load`.

    slots: number of slots unless a compiled tree or a flag of the verb has another.
    """
    given = {n: value for n in LOAD_OPTIONS if (value := getattr(parsed, n, None)) is not None}
    return given if parsed.compiled_path else {"max_concurrency": slots} | given
