"""Transcripts of long files, by bench/long_audio.py: whole, and in little memory."""

from pathlib import Path

import pytest

from bench import long_audio
from bench.common.measure import in_new_process
from testing.repeats import RUNS_ALL


@pytest.mark.parametrize("kind", long_audio.SOUNDS)
def test_a_long_file_is_transcribed_whole_and_in_flat_memory(kind: str, tmp_path: Path) -> None:
    """An hour with make test-all. In a process of its own."""
    seconds = 3600 if RUNS_ALL else 600
    found = in_new_process(long_audio.transcript, kind, tmp_path, seconds, 16)
    assert found["audio_s"] == pytest.approx(seconds, abs=3)
    if kind in ("no pauses", "music"):
        assert found["heard_s"] == found["audio_s"]
        # A window is cut in its last quarter.
        assert seconds / 30 <= found["windows"] <= seconds / 22.5 + 1
    elif kind == "pauses":
        assert found["whole"]
    else:
        assert (found["heard_s"], found["windows"]) == (0, 0)
    # The samples of ten minutes are 37 MB. The model takes some for its longest prompt.
    assert found["peak_mb"] < 60
