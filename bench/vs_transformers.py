"""The same checkpoint, prompts and greedy settings through transformers' generate and through us.

    python -m bench.vs_transformers --size tiny --json result.json

Checks that text, codes and audio are equal before it times anything, and that also warms both up;
then times both in one process, turn by turn, each from the conversation on: ours reads it itself,
and for theirs our own reader does, whose prompts are equal to their processor's. Their first sample
comes at their end, since nothing comes before it.

A row is one reply; ratios are theirs over ours, of medians. Peak memory is that of a process a side
which loads the checkpoint and answers each prompt once: the most it ever had (VmHWM), less what it
had before it loaded. Both processes have imported both sides by then.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.arguments import positive
from bench.common.memory import peak_mb
from bench.common.metrics import request_metrics
from bench.common.observed import observe
from bench.common.results import publish, results_of
from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.conversation.template import Conversation
from qwen3_omni_neuron.tiny import write_tiny_checkpoint
from testing.oracle import GREEDY, Reference, ReferenceResult

QUESTION = Path(__file__).parents[1] / "examples" / "question.wav"
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "written": [{"role": "user", "content": "What colour is the sky, in one word or in two?"}],
    "spoken": [{"role": "user", "content": [{"type": "audio", "audio": str(QUESTION)}]}],
}
SIDES = ("ours", "transformers")
FIGURES = ("ttft_s", "ttfb_s", "total_s", "rtf")
OURS_A_ROUND = 3  # ours are short, and the first after theirs finds the caches full of theirs
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--text-tokens", type=positive, default=24)
    parser.add_argument("--frames", type=positive, default=48)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.side:
        print(json.dumps(memory_here(options.side, options.checkpoint, options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(folder, size=options.size)
        rows = [row for name in PROMPTS for row in compare(checkpoint, name, options)]
        memory = {side: memory_of(side, checkpoint, options) for side in SIDES}
    del options.side, options.checkpoint  # of the processes
    theirs_mb, ours_mb = memory["transformers"]["grown_mb"], memory["ours"]["grown_mb"]
    summary = {
        "prompts": {name: ratios([r for r in rows if r["prompt"] == name]) for name in PROMPTS},
        "memory": memory,
        "memory_ratio": theirs_mb / ours_mb,
    }
    publish(results_of("vs_transformers", arguments, options, rows, summary), options.json)


def compare(checkpoint: Path, name: str, options: argparse.Namespace) -> list[Row]:
    """Both through the same work, turn by turn: a row a reply."""
    messages, text_tokens = PROMPTS[name], options.text_tokens
    reference = Reference(checkpoint)
    with Qwen3Omni.load(checkpoint, dtype="float32") as omni:
        ours = omni.generate_audio(messages, **settings(options))
        # It leaves the last token unspoken where the limit ends the text: one more, for the check.
        theirs = answer(reference, omni.conversation, messages, options, text_tokens + 1)
        check_equal(ours, theirs, text_tokens, reference)
        answer(reference, omni.conversation, messages, options, text_tokens)
        audio_s = len(ours.audio) / ours.sample_rate
        rows: list[Row] = []
        for number in range(options.rounds):
            about = {"prompt": name, "round": number}
            for _ in range(OURS_A_ROUND):
                found = request_metrics(observe(omni, messages, settings(options)).events)
                figures = {figure: getattr(found, figure) for figure in FIGURES}
                rows.append({**about, "side": "ours", **figures})
            start_s = time.perf_counter()
            answer(reference, omni.conversation, messages, options, text_tokens)
            total_s = time.perf_counter() - start_s
            figures = {"ttft_s": None, "ttfb_s": total_s, "total_s": total_s}
            rows.append({**about, "side": "transformers", **figures, "rtf": total_s / audio_s})
    return [{**row, "frames": len(ours.codes), "audio_s": audio_s} for row in rows]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What we are asked with."""
    return {**GREEDY, **limits(options, options.text_tokens), "predictor_do_sample": False}


def limits(options: argparse.Namespace, text_tokens: int) -> dict[str, int]:
    # The talker token that meets its limit is never decoded: one more than there are to be frames.
    return {
        "thinker_max_new_tokens": text_tokens,
        "talker_max_new_tokens": options.frames + 1,
    }


def answer(
    reference: Reference,
    conversation: Conversation,
    messages: list[dict[str, Any]],
    options: argparse.Namespace,
    text_tokens: int,
) -> ReferenceResult:
    """Theirs, from the conversation on."""
    prompt = conversation.prompt(messages)
    return reference.generate(prompt, **limits(options, text_tokens))


def check_equal(
    ours: SpeechResult, theirs: ReferenceResult, text_tokens: int, reference: Reference
) -> None:
    """Text and codes equal, audio within 1e-4."""
    text = theirs.token_ids[:text_tokens]
    assert ours.token_ids == text, f"text differs: {ours.token_ids} and {text}"
    assert ours.codes.tolist() == theirs.codes.tolist(), "codes differ"
    worst = float(np.abs(ours.audio - reference.decode(theirs.codes).numpy()).max())
    assert worst < 1e-4, f"audio differs by {worst}"


def ratios(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians of both sides, and theirs over ours."""
    medians: dict[str, dict[str, float | None]] = {}
    for side in SIDES:
        medians[side] = {}
        for figure in FIGURES:
            there = [r[figure] for r in rows if r["side"] == side and r[figure] is not None]
            medians[side][figure] = statistics.median(there) if there else None
    found: dict[str, Any] = {**medians}
    for figure in ("ttfb_s", "total_s", "rtf"):
        ours, theirs = medians["ours"][figure], medians["transformers"][figure]
        assert ours is not None and theirs is not None, "both spoke"
        found[f"{figure.removesuffix('_s')}_ratio"] = theirs / ours
    return found


def memory_of(side: str, checkpoint: Path, options: argparse.Namespace) -> dict[str, float]:
    """`memory_here` of a process of its own."""
    command = [
        sys.executable,
        "-m",
        "bench.vs_transformers",
        "--side",
        side,
        "--checkpoint",
        str(checkpoint),
    ]
    command += ["--text-tokens", str(options.text_tokens), "--frames", str(options.frames)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def memory_here(side: str, checkpoint: Path, options: argparse.Namespace) -> dict[str, float]:
    """Load the checkpoint, answer each prompt once, and say what memory it took."""
    before_mb = peak_mb()
    if side == "ours":
        with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=1) as omni:
            loaded_mb = peak_mb()
            for messages in PROMPTS.values():
                omni.generate_audio(messages, **settings(options))
    else:
        conversation = Conversation(checkpoint, read_config(checkpoint))
        reference = Reference(checkpoint)
        loaded_mb = peak_mb()
        for messages in PROMPTS.values():
            answer(reference, conversation, messages, options, options.text_tokens)
    found = {"before_mb": before_mb, "loaded_mb": loaded_mb, "peak_mb": peak_mb()}
    return {**found, "grown_mb": found["peak_mb"] - before_mb}


if __name__ == "__main__":
    main()
