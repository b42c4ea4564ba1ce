"""What verbs take that need a model: which one, and how it is loaded."""

import argparse
import os
from typing import Any

from qwen3_omni_neuron.checkpoint import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.errors import OptionError

MODEL_VARIABLE = "QWEN3_OMNI_MODEL"
_ELSE = "an error"


def add_model_arguments(parser: argparse.ArgumentParser, otherwise: str = _ELSE) -> None:
    """--model, --compiled, --dtype, and where it runs. otherwise: see add_checkpoint_argument."""
    add_checkpoint_argument(parser, otherwise)
    parser.add_argument(
        "--compiled", metavar="DIR", help="what `compile` wrote of this checkpoint; default: none"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float64")
    parser.add_argument(
        "--placement", default="shared", help="shared, or split: each stage in its own process"
    )
    parser.add_argument("--instance", help="of a tree for Neuron: trn2.48xlarge; default: asked")
    parser.add_argument(
        "--cores",
        type=cores,
        metavar="STAGE=N-N,...",
        help="of a tree for Neuron: thinker=0-7,talker=8-15,vocoder=16-23; default: the first ones",
    )


def add_checkpoint_argument(parser: argparse.ArgumentParser, otherwise: str = _ELSE) -> None:
    """--model alone. otherwise: what is taken where none is named."""
    parser.add_argument(
        "--model",
        default=os.environ.get(MODEL_VARIABLE),
        metavar="PATH",
        help=f"checkpoint folder or hub id; default: ${MODEL_VARIABLE}, or else {otherwise}",
    )


def model_or_ours(parsed: argparse.Namespace) -> str:
    """The checkpoint that was named, or else the one that ships."""
    return parsed.model or str(SPEAKING_CHECKPOINT)


def chosen_model(parsed: argparse.Namespace) -> str:
    """The checkpoint that was named. Raises OptionError where none was."""
    if not parsed.model:
        raise OptionError(f"no checkpoint: give --model PATH, or set {MODEL_VARIABLE}.")
    return parsed.model


def load_arguments(parsed: argparse.Namespace, slots: int) -> dict[str, Any]:
    """What `Qwen3Omni.load` takes beside the checkpoint. slots: that the verb needs; a compiled
    tree has its own number."""
    return {
        "dtype": parsed.dtype,
        "placement": parsed.placement,
        "compiled_path": parsed.compiled,
        "instance": parsed.instance,
        "cores": parsed.cores,
        "max_concurrency": None if parsed.compiled else slots,
    }


def cores(text: str) -> dict[str, str]:
    """ "thinker=0-7,talker=8-15" as {"thinker": "0-7", "talker": "8-15"}."""
    found = dict(part.partition("=")[::2] for part in text.split(","))
    if not all(found.values()):
        raise argparse.ArgumentTypeError(f"{text!r} names no cores, such as thinker=0-7")
    return found


def sizes(text: str) -> list[int]:
    """ "1,2,8" as [1, 2, 8]."""
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, such as 1,2,8") from None
