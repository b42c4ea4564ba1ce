"""One checkpoint, the same prompts and greedy settings through transformers' generate and ours.

    python -m bench.vs_transformers --size tiny --json result.json

The checkpoint is in bfloat16; both compute in float32, ours over the weights as they are,
transformers over weights widened to float32, or in bfloat16 with --reference-dtype bfloat16.

Checks that text, codes and audio are equal before it times anything, which also warms both up. Of
transformers in bfloat16, or of ours in int8 and int4, only the numbers of tokens and frames are
checked: rounding changes codes of random weights. Then times both in one process, in turn, from the
conversation on: our side reads it itself, and for transformers our own reader does, whose prompts
are equal to those of its processor. transformers returns all samples at the end, so its first
sample comes then.

A row is one reply; ratios are transformers' over ours, of medians. Peak memory is measured in one
process for each side, which loads the checkpoint and answers each prompt once: its peak (VmHWM),
less what it had before it loaded. Both processes have imported both sides by then.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common.measure import in_new_process
from bench.common.models import GREEDY, add_size_argument, made_checkpoint
from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.verification.oracle import Reference, ReferenceResult
from testing.command_line import Figures, InputError, Row, parser_of, positive, run
from testing.headlines import of_speech
from testing.memory import peak_mb
from testing.metrics import request_metrics
from testing.observed import observe

QUESTION = Path(__file__).parents[1] / "examples" / "question.wav"
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "written": [{"role": "user", "content": "What colour is the sky, in one word or in two?"}],
    "spoken": [{"role": "user", "content": [{"type": "audio", "audio": str(QUESTION)}]}],
}
SIDES = ("ours", "transformers")
FIGURES = ("ttft_s", "ttfb_s", "total_s", "rtf")
# Our replies are short, and the first one after transformers' reply finds the CPU's caches full of
# other data.
OURS_A_ROUND = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("vs_transformers", __doc__)
    add_size_argument(parser)
    parser.add_argument("--dtype", default="auto", help="ours: a dtype of the CPU")
    choices = ("float32", "bfloat16")
    parser.add_argument("--reference-dtype", choices=choices, default="float32")
    parser.add_argument("--text-tokens", type=positive, default=24)
    parser.add_argument("--frames", type=positive, default=48)
    parser.add_argument("--rounds", type=positive, default=5)
    return run("vs_transformers", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Compare replies to every prompt, and the memory of both sides."""
    with made_checkpoint(options.size) as checkpoint:
        rows = [row for name in PROMPTS for row in compare(checkpoint, name, options)]
        memory = {side: in_new_process(memory_here, side, checkpoint, options) for side in SIDES}
    summary: dict[str, Any] = {
        "prompts": {name: ratios([r for r in rows if r["prompt"] == name]) for name in PROMPTS},
        "memory": memory,
        "memory_ratio": memory["transformers"]["grown_mb"] / memory["ours"]["grown_mb"],
    }
    found = summary["prompts"].values()
    anchors = {}
    for name, ratio in (("TTFB", "ttfb_ratio"), ("RTF", "rtf_ratio")):
        times = " and ".join(f"{one[ratio]:.3g}" for one in found)
        anchors[name] = f"transformers takes {times} times as long"
    return rows, summary, of_speech([row for row in rows if row["side"] == "ours"], anchors)


def compare(checkpoint: Path, name: str, options: argparse.Namespace) -> list[Row]:
    """Answer one prompt with both, in turn: a row for each reply."""
    messages, text_tokens = PROMPTS[name], options.text_tokens
    reference = reference_of(checkpoint, options)
    # No prefix cache, because the prompt is repeated and transformers computes it each time.
    with Qwen3Omni.load(checkpoint, dtype=options.dtype, reuse=False) as omni:
        ours = omni.generate_audio(messages, **settings(options))
        # transformers does not speak the last token if the limit ends the text: one more token.
        theirs = answer(reference, omni.prompt_builder, messages, options, text_tokens + 1)
        if options.reference_dtype == "bfloat16" or options.dtype in ("int8", "int4"):
            check_as_long(ours, theirs, text_tokens)
        else:
            check_equal(ours, theirs, text_tokens, reference)
        answer(reference, omni.prompt_builder, messages, options, text_tokens)
        audio_s = len(ours.audio) / ours.sample_rate
        rows: list[Row] = []
        for number in range(options.rounds):
            about = {"prompt": name, "round": number}
            for _ in range(OURS_A_ROUND):
                found = request_metrics(observe(omni, messages, settings(options)).events)
                figures = {figure: getattr(found, figure) for figure in FIGURES}
                rows.append({**about, "side": "ours", **figures})
            start_s = time.perf_counter()
            answer(reference, omni.prompt_builder, messages, options, text_tokens)
            total_s = time.perf_counter() - start_s
            figures = {"ttft_s": None, "ttfb_s": total_s, "total_s": total_s}
            rows.append({**about, "side": "transformers", **figures, "rtf": total_s / audio_s})
    return [{**row, "frames": len(ours.codes), "audio_s": audio_s} for row in rows]


def reference_of(checkpoint: Path, options: argparse.Namespace) -> Reference:
    """Load transformers' side."""
    return Reference(checkpoint, getattr(torch, options.reference_dtype))


def limits(options: argparse.Namespace, text_tokens: int) -> dict[str, Any]:
    """Return the limits that give this many text tokens, and --frames frames."""
    # The talker token that meets its limit is never decoded: the limit is one more than frames.
    return {"thinker_max_new_tokens": text_tokens, "talker_max_new_tokens": options.frames + 1}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of our requests."""
    return {**GREEDY, **limits(options, options.text_tokens), "runaway_speech": "keep"}


def answer(
    reference: Reference,
    prompt_builder: PromptBuilder,
    messages: list[dict[str, Any]],
    options: argparse.Namespace,
    text_tokens: int,
) -> ReferenceResult:
    """Answer with transformers, including the processing of the conversation."""
    return reference.generate(prompt_builder.prompt(messages), **limits(options, text_tokens))


def check_equal(
    ours: SpeechResult, theirs: ReferenceResult, text_tokens: int, reference: Reference
) -> None:
    """Assert that text and codes are equal, and audio within 1e-4."""
    text = theirs.token_ids[:text_tokens]
    assert ours.token_ids == text, f"text differs: {ours.token_ids} and {text}"
    assert ours.codes.tolist() == theirs.codes.tolist(), "codes differ"
    worst = float(np.abs(ours.audio - reference.decode(theirs.codes).numpy()).max())
    assert worst < 1e-4, f"audio differs by {worst}"


def check_as_long(ours: SpeechResult, theirs: ReferenceResult, text_tokens: int) -> None:
    """Raise InputError where a reply has other numbers of tokens and frames than the other."""
    found = len(ours.token_ids), len(ours.codes)
    other = len(theirs.token_ids[:text_tokens]), len(theirs.codes)
    if found != other:
        raise InputError(f"tokens and frames of ours are {found}, of transformers {other}.")


def ratios(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the medians of both sides, and transformers' over ours."""

    def median(side: str, figure: str) -> float | None:
        found = [r[figure] for r in rows if r["side"] == side and r[figure] is not None]
        return statistics.median(found) if found else None

    medians = {side: {figure: median(side, figure) for figure in FIGURES} for side in SIDES}
    found: dict[str, Any] = {**medians}
    for figure in ("ttfb_s", "total_s", "rtf"):
        ours, theirs = medians["ours"][figure], medians["transformers"][figure]
        assert ours is not None and theirs is not None, "both spoke"
        found[f"{figure.removesuffix('_s')}_ratio"] = theirs / ours
    return found


def memory_here(side: str, checkpoint: Path, options: argparse.Namespace) -> dict[str, float]:
    """Load the checkpoint, answer each prompt once, and return this process's memory."""
    before_mb = peak_mb()
    if side == "ours":
        with Qwen3Omni.load(checkpoint, dtype=options.dtype, max_concurrency=1) as omni:
            loaded_mb = peak_mb()
            for messages in PROMPTS.values():
                omni.generate_audio(messages, **settings(options))
    else:
        prompt_builder = PromptBuilder(checkpoint, read_config(checkpoint))
        reference = reference_of(checkpoint, options)
        loaded_mb = peak_mb()
        for messages in PROMPTS.values():
            answer(reference, prompt_builder, messages, options, options.text_tokens)
    found = {"before_mb": before_mb, "loaded_mb": loaded_mb, "peak_mb": peak_mb()}
    return {**found, "grown_mb": found["peak_mb"] - before_mb}


if __name__ == "__main__":
    sys.exit(main())
