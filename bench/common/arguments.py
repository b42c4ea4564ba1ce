"""Kinds of arguments on a benchmark's command line."""

import argparse


def positive(text: str) -> int:
    """A number of things, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def natural(text: str) -> int:
    """A number of things, or none."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def sizes(text: str) -> list[int]:
    """ "1,2,8" as [1, 2, 8]."""
    return [positive(size) for size in text.split(",")]
