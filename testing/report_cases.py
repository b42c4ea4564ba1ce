"""Made-up result files for the report: round numbers, in the form that the benchmarks write."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from bench.common.metrics import (
    ChunkArrival,
    RequestEvents,
    RequestMetrics,
    TextArrival,
    request_metrics,
    summarize,
)

MACHINE = {"cpu": "Made-up CPU", "architecture": "x86_64", "cores": 2, "memory_mb": 8192}
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "machine": {**MACHINE, "threads": 1}}
SETTINGS = {"model": None, "size": "tiny", "dtype": "auto", "concurrency": 1, "seed": 0}
FRAMES = (1, 2, 4)
LATENCY_SAMPLES, FRAME_SAMPLES, RATE = 555, 1920, 24000
CALLS = (
    ("preprocessing", 0.0, 0.01),
    ("thinker prefill", 0.01, 0.03),
    ("talker prepare", 0.012, 0.015),
    ("talker prefill", 0.035, 0.04),
    ("code predictor", 0.04, 0.05),
    ("code2wav", 0.05, 0.06),
    ("thinker decode", 0.04, 0.045),
    ("thinker decode", 0.046, 0.05),
    ("talker step", 0.06, 0.065),
)


def request(number: int, first_s: float, cut: bool = False, **changes: Any) -> dict[str, Any]:
    """A row of ttfb_rtf.py: its first sample after first_s, its first text after half of that, 7
    frames in 3 chunks that come 50 ms apart. cut: by a token limit."""
    samples = [FRAME_SAMPLES * frames for frames in FRAMES]
    samples[0] -= LATENCY_SAMPLES
    at_s = [first_s + 0.05 * index for index in range(len(FRAMES))]
    events = RequestEvents(
        0.0,
        (TextArrival(first_s / 2, 1), TextArrival(first_s / 2 + 0.02, 2)),
        tuple(map(ChunkArrival, at_s, samples, FRAMES)),
        at_s[-1],
        "length" if cut else "stop",
        "stop",
    )
    firsts = [sum(samples[:index]) for index in range(len(samples))]
    names = ("arrival_s", "first_sample", "samples", "frames")
    each = zip(at_s, firsts, samples, FRAMES, strict=True)
    chunks = [dict(zip(names, chunk, strict=True)) for chunk in each]
    about = {"request": number, "conversation": "sky", "seed": number, "error": None}
    figures = vars(request_metrics(events))
    return {**about, **figures, "audio_file": None, "chunks": chunks, **changes}


def timeline() -> list[dict[str, Any]]:
    return [{"stage": s, "start_s": a, "end_s": b, "slots": [0]} for s, a, b in CALLS]


def case(driven: str, concurrency: int, ttfb_s: float, rtf: float) -> dict[str, Any]:
    """A row of a replay."""
    return {
        "kind": "replay",
        "profile": "made-up",
        "driven": driven,
        "placement": "split",
        "concurrency": concurrency,
        "requests": 100,
        "ttfb_p50_s": ttfb_s,
        "ttfb_p95_s": 2 * ttfb_s,
        "rtf_mean": rtf,
    }


def results(
    rows: list[dict[str, Any]],
    summary: dict[str, Any],
    benchmark: str = "ttfb_rtf",
    **settings: Any,
) -> dict[str, Any]:
    return {
        "schema": 1,
        "benchmark": benchmark,
        "command": ["python", "-m", f"bench.{benchmark}", "--seed", "0"],
        "versions": VERSIONS,
        "settings": {**SETTINGS, **settings},
        "rows": rows,
        "summary": summary,
    }


def requests(ttfb_s: list[float], **settings: Any) -> dict[str, Any]:
    """A result of ttfb_rtf.py; every third request was truncated."""
    rows = [request(n, at_s, cut=n % 3 == 2) for n, at_s in enumerate(ttfb_s)]
    rows[0]["timeline"] = rows[-1]["timeline"] = timeline()
    return results(rows, summary_of(rows), **settings)


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = RequestMetrics.__dataclass_fields__
    return summarize([RequestMetrics(**{name: row[name] for name in names}) for row in rows])


def replay() -> dict[str, Any]:
    rows = [case("ours", 1, 0.4, 0.3), case("ours", 8, 0.8, 0.7), case("port's", 1, 1.7, 0.6)]
    return results(rows, {"ttfb_s": {"p50": 0.4}}, benchmark="replay")


def write(folder: Path, name: str, content: Any) -> Path:
    file = folder / name
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def write_sound(file: Path, samples: int) -> None:
    """A tone of 3 kHz over a little noise."""
    file.parent.mkdir(exist_ok=True)
    tone = 0.5 * np.sin(2 * np.pi * 3000 * np.arange(samples) / RATE)
    noise = 0.01 * np.random.default_rng(0).standard_normal(samples)
    soundfile.write(file, tone + noise, RATE, "PCM_16")
