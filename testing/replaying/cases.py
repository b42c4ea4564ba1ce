"""Figures of one replay: a profile, a way to call the stages, a placement, and a load."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from testing.command_line import Row
from testing.replaying.device import Behaviour
from testing.replaying.load import RequestLengths
from testing.replaying.profiles import StageProfile
from testing.replaying.simulation import replay

PROFILES = Path(__file__).parents[1] / "profiles"
PORT = Behaviour(
    "port's", (25,), (25,), 5, inline_frames=25, context_frames=5, driver=True, knows_cores=False
)
OURS = Behaviour("ours, adaptive")


def case(
    profile: StageProfile,
    behaviour: Behaviour,
    placement: str,
    concurrency: int,
    load: Sequence[RequestLengths],
) -> Row:
    """Replay the load, and return its figures. Times are in seconds.

    underruns, silent_s: sums over all requests. first_chunks: sizes of the last request's first
    chunks, in frames.
    """
    replies = replay(profile, behaviour, placement, concurrency, load).replies
    timings = [reply.result.timings for reply in replies]
    ttfb_s = [t.ttfb_s for t in timings if t.ttfb_s is not None]
    rtf = [t.rtf for t in timings if t.rtf is not None]
    return {
        "kind": "replay",
        "profile": profile.name,
        "driven": behaviour.name,
        "placement": placement,
        "concurrency": concurrency,
        "requests": len(replies),
        "ttft_mean_s": statistics.mean(t.ttft_s for t in timings),
        "ttfb_mean_s": statistics.mean(ttfb_s),
        "ttfb_p50_s": statistics.median(ttfb_s),
        "ttfb_p95_s": p95(ttfb_s),
        "rtf_mean": statistics.mean(rtf),
        "rtf_p95": p95(rtf),
        "underruns": sum(reply.underruns for reply in replies),
        "silent_s": sum(reply.silent_s for reply in replies),
        "first_chunks": replies[-1].chunks[:6],
    }


def p95(values: Sequence[float]) -> float:
    """Return the smallest value that 95 % of the values do not exceed."""
    return float(np.percentile(values, 95, method="inverted_cdf"))
