"""The model that a benchmark runs, its engines, and inputs for them.

The checkpoint is a named one, or one of random weights that is made for the run.
"""

import bisect
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cli import model_arguments
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from testing.command_line import InputError
from testing.tiny import write_tiny_checkpoint

GREEDY = {"thinker_do_sample": False, "talker_do_sample": False, "predictor_do_sample": False}


def add_model_arguments(parser: ArgumentParser) -> None:
    """Add the model arguments of the package's commands, and --size."""
    model_arguments.add_model_arguments(parser)
    add_size_argument(parser, "without --model: ")


def add_size_argument(parser: ArgumentParser, when: str = "") -> None:
    """Add --size alone."""
    text = f"{when}a checkpoint of random weights, made for this run; wide takes 5.4 GB of disk"
    parser.add_argument("--size", choices=("tiny", "small", "wide"), default="tiny", help=text)


@contextmanager
def made_checkpoint(size: str, outlier: bool = False) -> Iterator[Path]:
    """Make a checkpoint of random bfloat16 weights, and delete it at the end of the block.

    outlier: see write_tiny_checkpoint.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield write_tiny_checkpoint(folder, size=size, outlier=outlier)


@contextmanager
def chosen_checkpoint(options: Namespace) -> Iterator[str | Path]:
    """Yield the checkpoint that --model names, or else a made one."""
    if options.model:
        yield options.model
    else:
        with made_checkpoint(options.size) as checkpoint:
            yield checkpoint


def load_chosen(
    checkpoint: str | Path,
    options: Namespace,
    slots: int,
    wrap_engines: Callable[[Engines], Engines] | None = None,
    reuse: bool = False,
) -> Qwen3Omni:
    """Load the checkpoint with this number of slots; a compiled tree has its own number.

    reuse: whether there is a prefix cache, which falsifies a benchmark that repeats a prompt.
    """
    loading = model_arguments.load_arguments(options, slots)
    return Qwen3Omni.load(checkpoint, wrap_engines=wrap_engines, reuse=reuse, **loading)


@contextmanager
def loaded_engines(
    checkpoint: str | Path, options: Namespace, slots: int
) -> Iterator[tuple[PromptBuilder, Engines]]:
    """Load the checkpoint for direct calls of its engines from this thread."""
    found: list[Engines] = []

    def keep(engines: Engines) -> Engines:
        found.append(engines)
        return engines

    with load_chosen(checkpoint, options, slots, keep) as omni:
        found[0].enter_thread()
        yield omni.prompt_builder, found[0]


def written_messages(prompt_builder: PromptBuilder, tokens: int) -> list[dict[str, Any]]:
    """Return one user turn of repeated words, the longest whose prompt has at most `tokens` tokens.

    Raises InputError where the shortest conversation has more.
    """

    def messages(words: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "Ready." + " go" * words}]

    def length(words: int) -> int:
        return len(prompt_builder.prompt(messages(words)))

    if tokens < length(0):
        raise InputError(
            f"a prompt of {tokens} tokens is wanted, and the shortest conversation has {length(0)}."
        )
    # A word has at least one token; the tokenizer decides how many.
    return messages(bisect.bisect_right(range(tokens), tokens, key=length) - 1)


def released_sampling(draw: np.random.Generator) -> PredictorSampling:
    """Return the sampling of one frame at the released settings."""
    top_k, top_p = RequestOptions.predictor_top_k, RequestOptions.predictor_top_p
    return PredictorSampling(int(draw.integers(2**63)), top_k, top_p)
