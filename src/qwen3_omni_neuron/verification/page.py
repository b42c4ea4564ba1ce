"""The text page of a verification's results."""

import platform
from collections.abc import Iterator, Sequence

import torch

from qwen3_omni_neuron.compilation.versions import PACKAGE_VERSION
from qwen3_omni_neuron.verification.judgement import Difference
from qwen3_omni_neuron.verification.verify import Spoken, Verdict


def page(verdict: Verdict) -> str:
    """Return the page."""
    return "\n".join(_lines(verdict))


def _lines(verdict: Verdict) -> Iterator[str]:
    plan, reference = verdict.plan, verdict.reference
    yield f"qwen3-omni-neuron {PACKAGE_VERSION}, torch {torch.__version__}, {platform.platform()}"
    yield f"checkpoint: {verdict.folder}"
    yield (
        f"target {plan.target}, dtype {plan.dtype}, predictor_dtype {plan.predictor_dtype}, "
        f"tp {plan.tp}, lnc {plan.lnc}"
    )
    if reference is not None:
        made_by = f"transformers {reference.transformers}, {reference.dtype} on {reference.device}"
        yield f"reference: {made_by}"
        yield ""
        yield from _table(verdict.differences)
    yield ""
    yield "largest magnitudes that the engines returned:"
    yield from (f"  {name}: {size:.4g}" for name, size in verdict.largest.items())
    yield ""
    for number, spoken in enumerate(verdict.spoken, 1):
        yield from _answer(number, spoken)
    yield ""
    yield from _conclusion(verdict)


def _table(differences: Sequence[Difference]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("stage", "", "rows", "error", "allowed", "beyond", "same", "sampled")
    ]
    for one in differences:
        holds = "holds" if one.holds else "DIFFERS"
        error = "" if one.error is None else f"{one.error:.1e}"
        shares = ("" if s is None else f"{s:.1%}" for s in (one.agreement, one.sampled))
        size = one.stage, holds, str(one.rows), error
        rows.append((*size, f"{one.allowed:.1e}", f"{one.beyond:.1%}", *shares))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        name, *cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([name.strip().ljust(widths[0]), *cells]).rstrip()
    for one in differences:
        if one.first:
            yield f"{one.stage}: first difference that rounding does not explain: {one.first}"


def _answer(number: int, spoken: Spoken) -> Iterator[str]:
    result, t = spoken.result, spoken.result.timings
    yield f"{number}. {spoken.question.title}"
    yield f"   answer: {result.text!r}"
    if spoken.heard is None:
        yield "   no speech"
        return
    yield f"   transcript: {spoken.heard!r}"
    yield f"   {t.frames} frames, ended by {result.talker_finish_reason}"
    yield f"   TTFT {1000 * t.ttft_s:.0f} ms, TTFB {1000 * (t.ttfb_s or 0):.0f} ms, RTF {t.rtf:.2f}"


def _conclusion(verdict: Verdict) -> Iterator[str]:
    reference = verdict.reference
    if verdict.holds:
        yield "HOLDS" if reference else "HOLDS, checked without a reference"
        return
    if wrong := [one for one in verdict.differences if not one.holds]:
        first = wrong[0]
        yield f"DIFFERS, first in: {first.stage}" + (f" ({first.first})" if first.first else "")
        median_holds = first.error is not None and first.error <= first.allowed
        if reference and reference.dtype == "bfloat16" and median_holds:
            yield (
                "its median row holds, but in bfloat16, the reference's dtype, routers may choose "
                "other experts: first compare with a reference in float32"
            )
        if not first.graph:
            yield "try: compare the checkpoint's tokenizer and chat template with the reference's"
        elif first.sampled is not None:  # the code predictor
            yield "try: compile code_predictor again with --predictor-dtype mixed"
        else:
            yield f"try: compile {first.graph} again; then --target cpu --dtype float32"
    if verdict.broken:
        yield f"NaN or infinity, first in: {verdict.broken[0]}"
