"""Arguments of the verbs that load a model: its checkpoint, and how to load it."""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.checkpoint import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.loading import TARGETS

if TYPE_CHECKING:
    from qwen3_omni_neuron.events import ModelInfo

MODEL_VARIABLE = "QWEN3_OMNI_MODEL"
_NO_DEFAULT = "an error"
WHOLE_MODEL = "Qwen/Qwen3-Omni-30B-A3B-Instruct"

DTYPES = f"auto, {', '.join(TARGETS['cpu'].limits.dtypes)}"


def add_model_arguments(parser: argparse.ArgumentParser, otherwise: str = _NO_DEFAULT) -> None:
    """Add --model, --compiled, --dtype, --kv-cache-dtype, --placement, --threads and so on.

    otherwise: see add_checkpoint_argument.
    """
    add_checkpoint_argument(parser, otherwise)
    parser.add_argument(
        "--compiled",
        metavar="DIR|URL",
        help="folder that `compile` wrote for this checkpoint, or the URL that `push` printed; "
        "default: none",
    )
    parser.add_argument("--dtype", default="auto", help=DTYPES)
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="DTYPE",
        help=f"auto, {', '.join(TARGETS['cpu'].kv_cache_dtypes)}: of keys and values, on the CPU",
    )
    parser.add_argument(
        "--predictor-dtype",
        default="auto",
        metavar="DTYPE",
        help="auto, same or mixed: numbers of the code predictor, on the CPU; a tree has its own",
    )
    parser.add_argument(
        "--placement", default="shared", help="shared, or split: each stage in its own process"
    )
    parser.add_argument(
        "--threads", type=int, help="CPU threads of all stages together; default: the cores here"
    )
    parser.add_argument(
        "--instance",
        help="instance type, for a tree for Neuron, such as trn2.48xlarge; default: this machine's",
    )
    parser.add_argument(
        "--cores",
        type=cores,
        metavar="STAGE=N-N,...",
        help="cores of each stage, for a tree for Neuron, such as "
        "thinker=0-7,talker=8-15,vocoder=16-23; default: the first ones",
    )


def add_checkpoint_argument(parser: argparse.ArgumentParser, otherwise: str = _NO_DEFAULT) -> None:
    """Add --model. otherwise: help text for the default where the environment sets none."""
    parser.add_argument(
        "--model",
        default=os.environ.get(MODEL_VARIABLE),
        metavar="PATH",
        help=f"checkpoint folder or hub id; default: ${MODEL_VARIABLE}, or else {otherwise}",
    )


def model_or_shipped(parsed: argparse.Namespace) -> str:
    """Return the checkpoint that was named, or the one that ships with the package."""
    return parsed.model or str(SPEAKING_CHECKPOINT)


def introduce(info: "ModelInfo") -> None:
    """Print what the checkpoint says of itself, if anything, and how to get the whole model."""
    if info.introduction:
        questions = ", ".join(f'"{question}"' for question in info.questions)
        asked = f" Ask it: {questions}." if questions else ""
        print(
            f"{info.introduction}{asked} The whole model: --model {WHOLE_MODEL}; "
            "`qwen3-omni-neuron doctor` says whether this machine can run it.",
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

    slots: number of slots that the verb needs; a compiled tree has its own number.
    """
    return {
        "dtype": parsed.dtype,
        "placement": parsed.placement,
        "compiled_path": parsed.compiled,
        "instance": parsed.instance,
        "cores": parsed.cores,
        "threads": parsed.threads,
        "kv_cache_dtype": parsed.kv_cache_dtype,
        "predictor_dtype": parsed.predictor_dtype,
        "max_concurrency": None if parsed.compiled else slots,
    }


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
