"""Made-up result files for the report: round numbers, in the form that the benchmarks write.

Their figures are computed here, not by bench/; test/unit/test_bench_scripts.py compares the forms.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

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
    """Return a row of bench/ttfb_rtf.py.

    Its first sample comes after first_s, its first text after half of that, 7 frames in 3 chunks 50
    ms apart: the second and the third chunk come in time. cut: whether a token limit cut it.
    """
    samples = [FRAME_SAMPLES * frames for frames in FRAMES]
    samples[0] -= LATENCY_SAMPLES
    at_s = [first_s + 0.05 * index for index in range(len(FRAMES))]
    audio_s = sum(samples) / RATE
    figures = {
        "ttft_s": first_s / 2,
        "itl_s": 0.01,
        "ttfb_s": first_s,
        "total_s": at_s[-1],
        "audio_s": audio_s,
        "rtf": at_s[-1] / audio_s,
        "text_tokens": 3,
        "frames": sum(FRAMES),
        "underruns": 0,
        "silent_s": 0.0,
        "thinker_finish_reason": "length" if cut else "stop",
        "talker_finish_reason": "stop",
        "truncated": cut,
    }
    firsts = [sum(samples[:index]) for index in range(len(samples))]
    names = ("arrival_s", "first_sample", "samples", "frames")
    each = zip(at_s, firsts, samples, FRAMES, strict=True)
    chunks = [dict(zip(names, chunk, strict=True)) for chunk in each]
    about = {"request": number, "conversation": "sky", "seed": number, "error": None}
    return {**about, **figures, "audio_file": None, "chunks": chunks, **changes}


def timeline() -> list[dict[str, Any]]:
    return [{"stage": s, "start_s": a, "end_s": b, "slots": [0]} for s, a, b in CALLS]


def case(driven: str, concurrency: int, ttfb_s: float, rtf: float) -> dict[str, Any]:
    """Return a row of bench/replay.py."""
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
    """Return a result of ttfb_rtf.py; every third request was truncated."""
    rows = [request(n, at_s, cut=n % 3 == 2) for n, at_s in enumerate(ttfb_s)]
    rows[0]["timeline"] = rows[-1]["timeline"] = timeline()
    return results(rows, summary_of(rows), **settings)


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of ttfb_rtf.py: distributions of the figures, and counts."""
    early = ("ttft_s", "itl_s", "ttfb_s")
    figures = (*early, "total_s", "audio_s", "rtf", "text_tokens", "frames", "silent_s")

    def distributions(names: Sequence[str], of: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: distribution([row[name] for row in of]) for name in names}

    return {
        "requests": len(rows),
        "truncated_requests": sum(row["truncated"] for row in rows),
        "truncated_text": sum(row["truncated"] for row in rows),
        "truncated_speech": 0,
        "without_speech": 0,
        "underruns": 0,
        "requests_with_underruns": 0,
        "all": distributions(early, rows),
        "complete": distributions(figures, [row for row in rows if not row["truncated"]]),
        "truncated": distributions(figures, [row for row in rows if row["truncated"]]),
    }


def distribution(values: list[float]) -> dict[str, float] | None:
    """Return count, mean and percentiles, or None if there are no values."""
    if not values:
        return None
    ranks = {f"p{rank}": float(np.percentile(values, rank)) for rank in (50, 90, 95, 99)}
    return {"count": len(values), "mean": float(np.mean(values)), **ranks}


def replay() -> dict[str, Any]:
    rows = [case("ours", 1, 0.4, 0.3), case("ours", 8, 0.8, 0.7), case("port's", 1, 1.7, 0.6)]
    return results(rows, {"ttfb_s": {"p50": 0.4}}, benchmark="replay")


def write(folder: Path, name: str, content: Any) -> Path:
    file = folder / name
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def write_sound(file: Path, samples: int) -> None:
    """Write a tone of 3 kHz over a little noise."""
    file.parent.mkdir(exist_ok=True)
    tone = 0.5 * np.sin(2 * np.pi * 3000 * np.arange(samples) / RATE)
    noise = 0.01 * np.random.default_rng(0).standard_normal(samples)
    soundfile.write(file, tone + noise, RATE, "PCM_16")
