"""`qwen3-omni-neuron push` and `pull`: copy compiled trees to and from shared storage."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qwen3_omni_neuron.compilation.storage import Progress, pull_tree, push_tree


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
    with _byte_bar() as progress:
        address = push_tree(parsed.tree, parsed.url, progress)
    print(address)
    return 0


def add_pull(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_pull)
    parser.add_argument("url", metavar="URL", help="the address that `push` printed")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="default: a folder of the tree's hash in $XDG_CACHE_HOME/qwen3-omni-neuron/trees, "
        "where --compiled URL looks, too",
    )


def _pull(parsed: argparse.Namespace) -> int:
    """Pull a tree, and print its folder. Returns the exit status."""
    with _byte_bar() as progress:
        folder = pull_tree(parsed.url, parsed.folder, progress)
    print(folder)
    return 0


@contextmanager
def _byte_bar() -> Iterator[Progress]:
    """Show a progress bar in bytes on stderr."""
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
