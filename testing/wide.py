"""Greedy replies over a checkpoint of released widths, ours or the reference's, as JSON.

    python -m testing.wide ours DTYPE CHECKPOINT [CASE ...]
    python -m testing.wide theirs float32 CHECKPOINT [CASE ...]

Each runs in a process of its own, in turn: together they would need over 30 GB. Printed are token
ids and codes of each case, and the growth of the process's peak memory while it loads, in bytes.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.verification.oracle import Reference
from testing.media_cases import CLIP, image, text
from testing.replies import GREEDY

CASES = {
    "text": "What colour is the sky?",
    "audio": [CLIP],
    "image": [image(64, 96), text("What is this?")],
}
TOKENS = 4
FRAMES = 4
Reply = tuple[list[int], list[list[int]]]


def load_ours(checkpoint: Path, dtype: str) -> Callable[[Any], Reply]:
    """Load ours. Returns the function that answers a conversation."""
    omni = Qwen3Omni.load(checkpoint, dtype=dtype, max_concurrency=1, context_length=1024)
    options = {**GREEDY, "talker_max_new_tokens": FRAMES + 1}

    def answer(messages: Any) -> Reply:
        result = omni.generate_audio(messages, thinker_max_new_tokens=TOKENS, **options)
        return result.token_ids, result.codes.tolist()

    return answer


def load_theirs(checkpoint: Path, dtype: str) -> Callable[[Any], Reply]:
    """Load the reference, in float32. Returns the function that answers a conversation."""
    assert dtype == "float32", f"the reference computes in float32, got {dtype}"
    reference = Reference(checkpoint)
    prompt_builder = PromptBuilder(checkpoint, read_config(checkpoint))

    def answer(messages: Any) -> Reply:
        # The reference does not speak the token that meets its limit: see testing.replies.
        result = reference.generate(
            prompt_builder.prompt(messages),
            thinker_max_new_tokens=TOKENS + 1,
            talker_max_new_tokens=FRAMES + 1,
        )
        return result.token_ids[:TOKENS], result.codes.tolist()

    return answer


def peak_bytes() -> int:
    """Return the most bytes that were ever resident in this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main(whose: str, dtype: str, checkpoint: str, *cases: str) -> None:
    """Load, answer and print."""
    before = peak_bytes()
    load = {"ours": load_ours, "theirs": load_theirs}[whose]
    answer = load(Path(checkpoint), dtype)
    growth = peak_bytes() - before
    replies = {case: answer([{"role": "user", "content": CASES[case]}]) for case in cases}
    json.dump({"load_bytes": growth, "replies": replies}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
