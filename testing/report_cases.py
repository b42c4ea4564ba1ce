"""Made-up result files for the report, with round numbers, in the form that benchmarks write.

test/unit/test_bench_scripts.py compares the form with that of real results.
"""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

MACHINE = {"cpu": "Made-up CPU", "architecture": "x86_64", "cores": 2, "memory_mb": 8192}
FRAMES = (1, 2, 4)  # of the chunks
LATENCY_SAMPLES, FRAME_SAMPLES, RATE = 555, 1920, 24000
SAMPLES = [FRAME_SAMPLES * frames for frames in FRAMES]
SAMPLES[0] -= LATENCY_SAMPLES
EARLY = ("ttft_s", "itl_s", "ttfb_s")  # figures that no limit changes
FIGURES = (*EARLY, "total_s", "audio_s", "rtf", "text_tokens", "frames", "silent_s")
CALLS = (
    ("preprocessing", 0.0, 0.01),
    ("thinker prefill", 0.01, 0.03),
    ("talker prefill", 0.035, 0.04),
    ("code predictor", 0.04, 0.05),
    ("code2wav", 0.05, 0.06),
)


def request(number: int, first_s: float, cut: bool = False, **changes: Any) -> dict[str, Any]:
    """Return a row of bench/ttfb_rtf.py.

    Its first sample comes after first_s, its first text after half of that, and 7 frames in 3
    chunks 50 ms apart, all in time. cut: by a token limit.
    """
    at_s = [first_s + 0.05 * index for index in range(len(FRAMES))]
    audio_s = sum(SAMPLES) / RATE
    metrics = {
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
    names = ("arrival_s", "first_sample", "samples", "frames")
    each = zip(at_s, accumulate(SAMPLES, initial=0), SAMPLES, FRAMES, strict=False)
    chunks = [dict(zip(names, chunk, strict=True)) for chunk in each]
    about = {"request": number, "conversation": "sky", "seed": number, "error": None}
    return {**about, **metrics, "audio_file": None, "chunks": chunks, **changes}


def results(
    rows: list[dict[str, Any]],
    summary: dict[str, Any],
    benchmark: str = "ttfb_rtf",
    **settings: Any,
) -> dict[str, Any]:
    """Return a result file's content."""
    return {
        "schema": 1,
        "benchmark": benchmark,
        "command": ["python", "-m", f"bench.{benchmark}", "--seed", "0"],
        "versions": {"python": "3.11.7", "torch": "2.13.0", "machine": MACHINE},
        "settings": {"model": None, "size": "tiny", "concurrency": 1, "seed": 0, **settings},
        "rows": rows,
        "summary": summary,
    }


def requests(ttfb_s: list[float], **settings: Any) -> dict[str, Any]:
    """Return a result of ttfb_rtf.py. The first has a timeline; every third was truncated."""
    rows = [request(n, at_s, cut=n % 3 == 2) for n, at_s in enumerate(ttfb_s)]
    cut = [row for row in rows if row["truncated"]]
    summary = {
        "requests": len(rows),
        "truncated_requests": len(cut),
        "all": {name: distribution(rows, name) for name in EARLY},
        "complete": {n: distribution([x for x in rows if x not in cut], n) for n in FIGURES},
        "truncated": {name: distribution(cut, name) for name in FIGURES},
    }
    rows[0]["timeline"] = [
        {"stage": s, "start_s": a, "end_s": b, "slots": [0]} for s, a, b in CALLS
    ]
    return results(rows, summary, **settings)


def distribution(rows: list[dict[str, Any]], name: str) -> dict[str, float] | None:
    """Return count, mean and percentiles of a figure of some rows; None without rows."""
    values = [row[name] for row in rows]
    if not values:
        return None
    percentiles = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 95, 99)}
    return {"count": len(values), "mean": float(np.mean(values)), **percentiles}


def replay() -> dict[str, Any]:
    """Return a result of bench/replay.py."""
    names = ("driven", "concurrency", "ttfb_p50_s", "ttfb_p95_s", "rtf_mean")
    cases = [("ours", 1, 0.4, 0.8, 0.3), ("ours", 8, 0.8, 1.6, 0.7), ("port's", 1, 1.7, 3.4, 0.6)]
    about = {"kind": "replay", "profile": "made-up", "placement": "split", "requests": 100}
    rows = [about | dict(zip(names, case, strict=True)) for case in cases]
    return results(rows, {}, benchmark="replay")


def write(folder: Path, name: str, content: Any) -> Path:
    """Write a result file, or text that is none."""
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file
