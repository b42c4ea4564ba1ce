"""`qwen3-omni-neuron tiny-checkpoint`: writes a small checkpoint of random weights."""

import argparse

from qwen3_omni_neuron.cli.parsing import CommandParser


def add_tiny(parser: CommandParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_tiny)
    parser.add_examples("tiny-checkpoint my-checkpoint --seed 7")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    sizes = "tiny (1.4 M parameters), small (155 M), wide (2.7 G), released (35 G), speaking (6 M)"
    parser.add_argument("--size", default="tiny", help=sizes)
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument(
        "--drawn",
        action="store_true",
        help="write no weights: each is drawn from the seed when it is read (released: 70 GB less)",
    )
    parser.add_argument(
        "--outlier",
        action="store_true",
        help="give the code predictor the activation of 49,000 that was published for the real one",
    )


def _tiny(parsed: argparse.Namespace) -> int:
    """Write the checkpoint. Returns the exit status."""
    from qwen3_omni_neuron.checkpoint.tiny import write_tiny_checkpoint

    folder = write_tiny_checkpoint(
        parsed.folder, parsed.seed, parsed.size, parsed.dtype, parsed.drawn, parsed.outlier
    )
    print(f"wrote a {parsed.size} checkpoint with random weights to {folder}")
    return 0
