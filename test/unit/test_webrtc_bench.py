"""bench/webrtc.py: what its figures say. aiortc and a network that loses packets are not needed."""

import asyncio
import os
import sys
import time

import pytest

from bench import webrtc
from bench.common.command_line import InputError
from bench.common.metrics import ChunkArrival
from bench.webrtc import PacedStream, figures, framed, played


def test_a_stall_and_what_is_missing_after_it() -> None:
    """A frame that comes 120 ms late, after six that never do; then frames that stay late."""
    times = [0.02 * n for n in range(100)]
    arrivals = [(t, 5 + t) for t in times] + [(2.12, 5 + 2.12)]
    found = figures(arrivals)
    assert (found["frames"], found["missing_ms"]) == (101, 120)
    assert found["stall_ms_max"] == pytest.approx(120, abs=0.1)
    assert found["stalls"] == pytest.approx(60 / 2.12, abs=0.1), "one in 2.12 s"
    late = figures([(t + (0.2 if t > 1.2 else 0), t) for t in times])
    assert (late["missing_ms"], late["behind_ms"], late["behind_ms_end"]) == (0, 0.0, 200.0)
    with pytest.raises(InputError, match="1 frames were received"):
        figures(arrivals[:1])


@pytest.mark.parametrize(("late_s", "stall_ms"), [(0.1, 0), (0.3, 100)])
def test_a_player_waits_for_a_chunk_that_is_later_than_its_buffer(
    late_s: float, stall_ms: float
) -> None:
    """It is behind by its buffer, and by every wait since."""
    times = [0.08 * n for n in range(50)]
    chunks = [ChunkArrival(t + (late_s if t >= 1 else 0), 1920, 1) for t in times]
    found = figures(played(chunks, 0.2), 0.2)
    assert (found["frames"], found["missing_ms"]) == (200, 0)
    assert found["stall_ms_max"] == pytest.approx(stall_ms, abs=0.1)
    assert found["behind_ms_end"] == pytest.approx(200 + stall_ms, abs=0.1)


def test_a_frame_is_there_with_its_last_sample() -> None:
    pieces = [(1.0, 0.03), (2.0, 0.01), (3.0, 0.05), (4.0, 0.01), (5.0, 0.01)]
    assert framed(pieces) == [
        (1.0, 0.0),
        (2.0, pytest.approx(0.02)),
        (3.0, pytest.approx(0.04)),
        (3.0, pytest.approx(0.06)),
        (4.0, pytest.approx(0.08)),
    ]


def test_no_sound_of_the_answer_comes_before_it_is_spoken() -> None:
    made = PacedStream(0.24)

    async def arrivals() -> list[tuple[float, int]]:
        return [(time.monotonic(), e.first_sample) async for e in made if hasattr(e, "samples")]

    found = asyncio.run(arrivals())
    assert [first for _, first in found] == [0, 1920, 3840]
    assert all(at_s - made._began_s > first / 24000 - 0.001 for at_s, first in found)


def test_what_is_missing_to_run_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiortc", None)
    assert webrtc.main(["--seconds", "1"]) == 1
    assert "pip install aiortc" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "aiortc", sys)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert webrtc.main(["--seconds", "1"]) == 1
    assert "needs Linux, root" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        webrtc.main(["--loss", "-1"])
