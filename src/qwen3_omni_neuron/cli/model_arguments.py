"""What every verb that runs a model takes: which one, and how it is loaded."""

import argparse
import os

from qwen3_omni_neuron.errors import OptionError

MODEL_VARIABLE = "QWEN3_OMNI_MODEL"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype and --placement."""
    parser.add_argument(
        "--model",
        default=os.environ.get(MODEL_VARIABLE),
        metavar="PATH",
        help=f"checkpoint folder or hub id; ${MODEL_VARIABLE} where it is not given",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float64")
    parser.add_argument(
        "--placement", default="shared", help="shared, or split: each stage in its own process"
    )


def chosen_model(parsed: argparse.Namespace) -> str:
    """The checkpoint that was named. Raises OptionError where none was."""
    if not parsed.model:
        raise OptionError(f"no checkpoint: give --model PATH, or set {MODEL_VARIABLE}.")
    return parsed.model
