"""`qwen3-omni-neuron verify`: compares a model with transformers, stage by stage."""

import argparse
import sys
from pathlib import Path

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.cli.model_arguments import (
    add_model_arguments,
    add_option,
    chosen_model,
    existing,
    load_arguments,
)
from qwen3_omni_neuron.cli.parsing import add_examples
from qwen3_omni_neuron.errors import ExitStatus, NotInstalledError, OptionError
from qwen3_omni_neuron.options import LOAD_OPTIONS

_DTYPES = ("float32", "bfloat16")


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_verify)
    add_examples(
        parser,
        "verify --model CHECKPOINT",
        "verify --model CHECKPOINT --write reference.npz",
        "verify --model CHECKPOINT --against reference.npz --compiled tree",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="run transformers; save its results as the reference FILE",
    )
    either.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with the reference FILE"
    )
    add_option(parser, LOAD_OPTIONS["target"])
    parser.add_argument(
        "--device",
        default="cpu",
        help="device of transformers for --write: cpu or cuda; default: cpu",
    )
    add_model_arguments(parser)


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _verify(parsed: argparse.Namespace) -> int:
    if parsed.write is not None:
        return _write(parsed)
    model = existing(chosen_model(parsed))
    from qwen3_omni_neuron.verification.page import page
    from qwen3_omni_neuron.verification.verify import verify

    load = load_arguments(parsed, slots=1)
    verdict = verify(model, parsed.against, load, progress=_tell)
    print(page(verdict))
    return ExitStatus.OK if verdict.holds else ExitStatus.FAILED


def _write(parsed: argparse.Namespace) -> int:
    dtype = "float32" if parsed.dtype == "auto" else parsed.dtype
    if dtype not in _DTYPES:
        raise OptionError(f"a reference must be in {' or '.join(_DTYPES)}, got --dtype {dtype}.")
    model = existing(chosen_model(parsed))
    try:
        from qwen3_omni_neuron.verification.reference import make_questions
        from qwen3_omni_neuron.verification.write import write_reference
    except ImportError as error:
        raise NotInstalledError(
            f"--write needs transformers ({error}). Install it: pip install 'transformers>=4.57,<6'"
        ) from error
    write_reference(
        model,
        parsed.write,
        make_questions(),
        dtype,
        parsed.device,
        adapters=[AdapterPath.of(adapter) for adapter in parsed.adapters or ()],
        progress=_tell,
    )
    print(f"wrote {parsed.write}: {parsed.write.stat().st_size / 1e6:.1f} MB")
    return 0
