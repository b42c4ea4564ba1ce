"""The page of results of a verification, to be read or pasted into an issue."""

import platform
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from qwen3_omni_neuron.verification.alone import Spoken
from qwen3_omni_neuron.verification.judgement import Difference
from qwen3_omni_neuron.verification.verify import Verdict

_HERE = "then --target cpu --dtype float32"
ADVICE = {
    "prompt": "tokenizer or chat template differ: compare the checkpoint's files.",
    "audio": f"compile model audio again; {_HERE}.",
    "vision": f"compile model vision again; {_HERE}.",
    "thinker": f"compile model thinker again, with another --lnc; {_HERE}.",
    "text": f"compile model talker again; {_HERE}.",
    "hidden": f"compile model talker again; {_HERE}.",
    "talker": f"compile model talker again, with another --lnc; {_HERE}.",
    "code": "compile again with --predictor-dtype mixed (float32 arithmetic); then code_predictor.",
    "sum": "the codec's tables differ: compile model code_predictor again.",
    "code2wav": f"compile model code2wav again; {_HERE}.",
}
"""Advice by the first word of a stage's name."""


def page(verdict: Verdict) -> str:
    """Return the page."""
    return "\n".join(_lines(verdict))


def _lines(verdict: Verdict) -> Iterator[str]:
    plan, about, seen = verdict.plan, verdict.about, verdict.seen
    yield f"qwen3-omni-neuron {PACKAGE_VERSION}, torch {torch.__version__}, {platform.platform()}"
    yield f"checkpoint: {verdict.folder}"
    yield (
        f"target {plan.target}, dtype {plan.dtype}, predictor_dtype {plan.predictor_dtype}, "
        f"tp {plan.tp}, lnc {plan.lnc}"
    )
    if about is not None:
        yield f"reference: transformers {about.transformers}, {about.dtype} on {about.device}"
        yield ""
        yield from _table(verdict.differences)
    yield ""
    yield "largest numbers that the engines returned:"
    yield from (f"  {name}: {size:.4g}" for name, size in seen.largest.items())
    for name, calls in seen.broken.items():
        yield f"  {name}: NaN or infinity in {calls} calls"
    yield ""
    for number, spoken in enumerate(verdict.spoken, 1):
        yield from _answer(number, spoken)
    yield from _rates(verdict.spoken)
    yield ""
    yield from _conclusion(verdict)


def _table(differences: Sequence[Difference]) -> Iterator[str]:
    head = "rows", "error", "allowed", "beyond", "cosine", "largest", "same", "sampled"
    rows = [("stage", "", *head)]
    for one in differences:
        rows.append(
            (
                one.stage,
                "holds" if one.holds else "DIFFERS",
                str(one.rows),
                _number(one.error),
                _number(one.allowed),
                f"{one.beyond:.1%}",
                "" if one.cosine is None else f"{one.cosine:.6f}",
                _number(one.largest),
                "" if one.agreement is None else f"{one.agreement:.1%}",
                "" if one.sampled is None else f"{one.sampled:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        name, *cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([name.strip().ljust(widths[0]), *cells]).rstrip()
    for one in differences:
        if one.first:
            yield f"{one.stage}: first beyond what rounding explains: {one.first}"
        if one.steps:
            steps = " ".join(f"{share:.0%}" for share in one.steps)
            yield f"{one.stage}: the same code at steps 1 to {len(one.steps)}: {steps}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _answer(number: int, spoken: Spoken) -> Iterator[str]:
    result, t = spoken.result, spoken.result.timings
    yield f"{number}. {spoken.question.title}"
    yield f"   answer: {result.text!r}"
    if spoken.heard is None:
        yield "   no speech that can be heard"
        return
    found = "no words" if spoken.found is None else f"{spoken.found:.0%} of its words"
    yield f"   heard again ({found}): {spoken.heard!r}"
    end = "no frame after the text's end" if spoken.end is None else f"at most {spoken.end:.3f}"
    yield f"   {t.frames} frames, ended by {result.talker_finish_reason}, end code: {end}"
    yield f"   TTFT {1000 * t.ttft_s:.0f} ms, TTFB {1000 * (t.ttfb_s or 0):.0f} ms, RTF {t.rtf:.2f}"


def _rates(spoken: Sequence[Spoken]) -> Iterator[str]:
    times = [one.result.timings for one in spoken if one.result.timings.rtf is not None]
    if times:
        ttfb = 1000 * float(np.median([t.ttfb_s for t in times if t.ttfb_s is not None]))
        rtf = float(np.median([t.rtf for t in times if t.rtf is not None]))
        yield f"median of {len(times)} answers: TTFB {ttfb:.0f} ms, RTF {rtf:.2f}"


def _conclusion(verdict: Verdict) -> Iterator[str]:
    wrong = [one for one in verdict.differences if not one.holds]
    if verdict.holds:
        yield "HOLDS" if verdict.about else "HOLDS, as far as it can be told without a reference"
        return
    if wrong:
        first = wrong[0]
        yield f"DIFFERS, first in: {first.stage}" + (f" ({first.first})" if first.first else "")
        if first.graph:
            yield f"its graphs, where it was compiled: {first.graph}"
        median_holds = first.error is not None and first.error <= first.allowed
        if verdict.about and verdict.about.dtype == "bfloat16" and median_holds:
            yield (
                "its median row holds, and the reference is in bfloat16, in which routers may "
                "choose other experts: compare with a reference in float32 first"
            )
        yield f"try: {ADVICE[first.stage.split()[0].split(chr(39))[0]]}"
    if verdict.seen.broken:
        yield f"NaN or infinity, first in: {next(iter(verdict.seen.broken))}"
