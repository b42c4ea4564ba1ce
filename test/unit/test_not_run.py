"""The summary of the proofs that a run of the tests left out."""

from testing.imports import ROOT
from testing.names import index
from testing.not_run import COMMANDS, HARMLESS


def test_every_reason_stands_in_a_test() -> None:
    own = ("testing/not_run.py", "test/unit/test_not_run.py")
    names = [name for name in index().paths if name.startswith("test") and name.endswith(".py")]
    files = [ROOT / name for name in names if name not in own]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert not [text for text in (*COMMANDS, *HARMLESS) if text not in sources]
