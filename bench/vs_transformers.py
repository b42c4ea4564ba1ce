"""The same checkpoint, prompt and greedy settings through transformers' generate and through us.

    python bench/vs_transformers.py --size tiny --json result.json

Checks that text, codes and audio are equal before it times anything, and that also warms both up;
then times both in one process, turn by turn, and prints the ratio of the medians.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.tiny import write_tiny_checkpoint
from reference import GREEDY, Reference, ReferenceResult

TEXT_TOKENS, FRAMES = 24, 48
MESSAGES = [{"role": "user", "content": "What colour is the sky, in one word or in two?"}]
# The talker token that meets its limit is never decoded: one more than there are to be frames.
LIMITS = {"thinker_max_new_tokens": TEXT_TOKENS, "talker_max_new_tokens": FRAMES + 1}
OURS_A_ROUND = 3  # ours are short, and the first after theirs finds the caches full of theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(folder, size=options.size)
        figures = compare(checkpoint, options.rounds)
    figures = {"size": options.size, **environment(), **figures}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def compare(checkpoint: Path, rounds: int) -> dict[str, Any]:
    """Both through the same work, turn by turn. Times in seconds."""
    reference = Reference(checkpoint)
    with Qwen3Omni.load(checkpoint, dtype="float32") as omni:
        prompt = omni.conversation.prompt(MESSAGES)

        def ours() -> SpeechResult:
            return omni.generate_audio(MESSAGES, predictor_do_sample=False, **GREEDY, **LIMITS)

        def theirs(text_tokens: int = TEXT_TOKENS) -> ReferenceResult:
            options = {**LIMITS, "thinker_max_new_tokens": text_tokens}
            return reference.generate(prompt, **options)

        # It leaves the last token unspoken where the limit ends the text: one more, for the check.
        check_equal(ours(), theirs(TEXT_TOKENS + 1), reference)
        theirs()
        our_s, their_s = [], []
        for _ in range(rounds):
            our_s += [timed(ours) for _ in range(OURS_A_ROUND)]
            their_s.append(timed(theirs))
        timings = ours().timings
    return {
        "text_tokens": timings.text_tokens,
        "frames": timings.frames,
        "ours_s": our_s,
        "transformers_s": their_s,
        "ratio": statistics.median(their_s) / statistics.median(our_s),
        "our_ttft_s": timings.ttft_s,
        "our_ttfb_s": timings.ttfb_s,
    }


def check_equal(ours: SpeechResult, theirs: ReferenceResult, reference: Reference) -> None:
    """Text and codes equal, audio within 1e-4."""
    text = theirs.token_ids[:TEXT_TOKENS]
    assert ours.token_ids == text, f"text differs: {ours.token_ids} and {text}"
    assert ours.codes.tolist() == theirs.codes.tolist(), "codes differ"
    worst = float(np.abs(ours.audio - reference.decode(theirs.codes).numpy()).max())
    assert worst < 1e-4, f"audio differs by {worst}"


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


if __name__ == "__main__":
    main()
