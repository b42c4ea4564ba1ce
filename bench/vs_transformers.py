"""The same checkpoint, prompt and greedy settings through transformers' generate and through us.

    python bench/vs_transformers.py --size tiny --json result.json

Checks that text, codes and audio are equal before it times anything, and that also warms both up;
then times both in one process, turn by turn, and prints the ratios of the medians: of the whole
time, and of the time to the first sample, which is all of it where nothing comes before the end.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from measure import environment, timed
from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.events import Timings
from qwen3_omni_neuron.tiny import write_tiny_checkpoint
from reference import GREEDY, Reference, ReferenceResult

MESSAGES = [{"role": "user", "content": "What colour is the sky, in one word or in two?"}]
OURS_A_ROUND = 3  # ours are short, and the first after theirs finds the caches full of theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--text-tokens", type=int, default=24)
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(folder, size=options.size)
        figures = compare(checkpoint, options.text_tokens, options.frames, options.rounds)
    figures = {"size": options.size, **environment(), **figures}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def compare(checkpoint: Path, text_tokens: int, frames: int, rounds: int) -> dict[str, Any]:
    """Both through the same work, turn by turn. Times in seconds."""
    # The talker token that meets its limit is never decoded: one more than there are to be frames.
    limits = {"thinker_max_new_tokens": text_tokens, "talker_max_new_tokens": frames + 1}
    reference = Reference(checkpoint)
    with Qwen3Omni.load(checkpoint, dtype="float32") as omni:
        prompt = omni.conversation.prompt(MESSAGES)

        def ours() -> SpeechResult:
            return omni.generate_audio(MESSAGES, predictor_do_sample=False, **GREEDY, **limits)

        def theirs(tokens: int = text_tokens) -> ReferenceResult:
            options = {**limits, "thinker_max_new_tokens": tokens}
            return reference.generate(prompt, **options)

        # It leaves the last token unspoken where the limit ends the text: one more, for the check.
        check_equal(ours(), theirs(text_tokens + 1), text_tokens, reference)
        theirs()
        timings: list[Timings] = []
        their_s: list[float] = []
        for _ in range(rounds):
            timings += [ours().timings for _ in range(OURS_A_ROUND)]
            their_s.append(timed(theirs))
    our_s = [t.total_s for t in timings]
    our_ttfb_s = [t.ttfb_s for t in timings if t.ttfb_s is not None]
    return {
        "text_tokens": timings[0].text_tokens,
        "frames": timings[0].frames,
        "ours_s": our_s,
        "transformers_s": their_s,
        "ratio": statistics.median(their_s) / statistics.median(our_s),
        "our_ttft_s": [t.ttft_s for t in timings],
        "our_ttfb_s": our_ttfb_s,
        "ttfb_ratio": statistics.median(their_s) / statistics.median(our_ttfb_s),
    }


def check_equal(
    ours: SpeechResult, theirs: ReferenceResult, text_tokens: int, reference: Reference
) -> None:
    """Text and codes equal, audio within 1e-4."""
    text = theirs.token_ids[:text_tokens]
    assert ours.token_ids == text, f"text differs: {ours.token_ids} and {text}"
    assert ours.codes.tolist() == theirs.codes.tolist(), "codes differ"
    worst = float(np.abs(ours.audio - reference.decode(theirs.codes).numpy()).max())
    assert worst < 1e-4, f"audio differs by {worst}"


if __name__ == "__main__":
    main()
