"""The checkpoint that ships with the package: a small world of words, heard and spoken for real.

Its model card, `speaking_checkpoint/README.md`, says what it knows and how it was trained.
"""

from pathlib import Path

SPEAKING_CHECKPOINT = Path(__file__).parent / "speaking_checkpoint"
