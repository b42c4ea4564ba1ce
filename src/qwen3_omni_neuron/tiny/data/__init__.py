"""Data of tiny checkpoints: released settings, sizes, chat template, preprocessor settings."""

from importlib import resources


def read_text(name: str) -> str:
    """Return the text of a file of this folder."""
    return (resources.files(__name__) / name).read_text(encoding="utf-8")
