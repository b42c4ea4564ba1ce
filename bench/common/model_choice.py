"""Which model a benchmark runs: a checkpoint that is named, or random weights made for it."""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cli import model_arguments
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.tiny import write_tiny_checkpoint


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the package's commands, and --size."""
    model_arguments.add_model_arguments(parser)
    parser.add_argument(
        "--size",
        choices=("tiny", "small"),
        default="tiny",
        help="without --model: a checkpoint of random weights, float32, made for this run",
    )


@contextmanager
def chosen_checkpoint(options: argparse.Namespace) -> Iterator[str | Path]:
    """The checkpoint; one that was made for the run is deleted after it."""
    if options.model:
        yield options.model
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write_tiny_checkpoint(folder, size=options.size, dtype="float32")


def load_chosen(
    checkpoint: str | Path,
    options: argparse.Namespace,
    slots: int,
    wrap_engines: Callable[[Engines], Engines] | None = None,
) -> Qwen3Omni:
    """Load it with so many slots; a compiled tree has its own number."""
    loading = model_arguments.load_arguments(options, slots)
    return Qwen3Omni.load(checkpoint, wrap_engines=wrap_engines, **loading)
