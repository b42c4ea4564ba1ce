"""`qwen3-omni-neuron push` and `pull`: copy compiled trees to and from shared storage."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_omni_neuron.cli.parsing import CommandParser
from qwen3_omni_neuron.cli.progress import add_quiet, bar_settings
from qwen3_omni_neuron.compilation.storage import pull_tree, push_tree

if TYPE_CHECKING:
    from fsspec.callbacks import TqdmCallback


def add_push(parser: CommandParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_push)
    parser.add_examples("push tree s3://BUCKET/TREES", "push tree /mnt/trees")
    parser.add_argument("tree", type=Path, metavar="DIR", help="what compile wrote as --out")
    parser.add_argument(
        "url",
        metavar="URL",
        help="folder, or address of a folder such as s3://BUCKET/TREES: the tree goes under it, in "
        "a folder of its hash",
    )
    add_quiet(parser)


def _push(parsed: argparse.Namespace) -> int:
    """Push a tree, and print its address. Returns the exit status."""
    with _byte_bar(parsed.quiet) as bar:
        address = push_tree(parsed.tree, parsed.url, bar)
    print(address)
    return 0


def add_pull(parser: CommandParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_pull)
    parser.add_examples("pull s3://BUCKET/TREES/HASH", "pull /mnt/trees/HASH tree")
    parser.add_argument("url", metavar="URL", help="the address that `push` printed")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="default: a folder of the tree's hash in $XDG_CACHE_HOME/qwen3-omni-neuron/trees, "
        "where --compiled URL looks, too",
    )
    add_quiet(parser)


def _pull(parsed: argparse.Namespace) -> int:
    """Pull a tree, and print its folder. Returns the exit status."""
    with _byte_bar(parsed.quiet) as bar:
        folder = pull_tree(parsed.url, parsed.folder, bar)
    print(folder)
    return 0


def _byte_bar(quiet: bool) -> "TqdmCallback":
    """Return a progress bar in bytes on stderr."""
    from fsspec.callbacks import TqdmCallback

    return TqdmCallback({"unit": "B", "unit_scale": True, **bar_settings(quiet)})
