"""`qwen3-omni-neuron push`: copies a compiled tree to shared storage."""

import argparse
from pathlib import Path

from qwen3_omni_neuron.cli.pull import byte_bar
from qwen3_omni_neuron.compilation.storage import push_tree


def add_push(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_push)
    parser.add_argument("tree", type=Path, metavar="DIR", help="what compile wrote as --out")
    parser.add_argument(
        "url",
        metavar="URL",
        help="folder, or address of a folder such as s3://BUCKET/TREES: the tree goes under it, in "
        "a folder of its hash",
    )


def _push(parsed: argparse.Namespace) -> int:
    """Push a tree, and print its address. Returns the exit status."""
    with byte_bar() as progress:
        address = push_tree(parsed.tree, parsed.url, progress)
    print(address)
    return 0
