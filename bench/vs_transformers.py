"""The same checkpoint, prompt and greedy settings through transformers' generate and through us.

    python bench/vs_transformers.py --size tiny --json result.json

Checks that text, codes and audio are equal before it times anything; then times both in one
process, turn by turn, and prints the ratio of the medians.
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
from transformers import Qwen3OmniMoeForConditionalGeneration

from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.prompt import Prompt
from qwen3_omni_neuron.tiny import write_tiny_checkpoint

TEXT_TOKENS, FRAMES = 24, 48
MESSAGES = [{"role": "user", "content": "What colour is the sky, in one word or in two?"}]
# As many as both engines make where neither limit nor EOS stops them; the talker token that meets
# its limit is never decoded, hence the one more.
GREEDY = {
    "thinker_max_new_tokens": TEXT_TOKENS,
    "thinker_do_sample": False,
    "talker_max_new_tokens": FRAMES + 1,
    "talker_do_sample": False,
}
NO_EOS = -1  # an id that is never written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(folder, size=options.size)
        figures = compare(checkpoint, options.rounds)
    figures = {"size": options.size, **environment(), **figures}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def compare(checkpoint: Path, rounds: int) -> dict[str, Any]:
    """Both through the same work, in turn. Times in seconds."""
    reference = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32
    ).eval()
    make_greedy(reference)
    with Qwen3Omni.load(checkpoint, dtype="float32") as omni:
        prompt = omni.conversation.prompt(MESSAGES)

        def ours() -> SpeechResult:
            return omni.generate_audio(MESSAGES, predictor_do_sample=False, **GREEDY)

        def theirs(text_tokens: int = TEXT_TOKENS) -> Any:
            return generate(reference, prompt, text_tokens)

        check_equal(ours(), theirs(TEXT_TOKENS + 1), len(prompt))
        theirs()
        our_s, their_s = [], []
        for _ in range(rounds):
            our_s.append(timed(ours))
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


def generate(reference: Any, prompt: Prompt, text_tokens: int) -> Any:
    """The reference's own generate. It speaks one token less than it writes at the limit."""
    ids = prompt.token_ids[None]
    options = {**GREEDY, "thinker_max_new_tokens": text_tokens}
    return reference.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        thinker_eos_token_id=NO_EOS,
        **options,
    )


def make_greedy(reference: Any) -> None:
    """4.57 samples the code predictor whatever talker_do_sample says; 5.x follows it."""
    predictor = reference.talker.code_predictor
    original = predictor.generate

    def greedy(**kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("top_k", "top_p")}
        return original(**{**kwargs, "do_sample": False})

    predictor.generate = greedy


def check_equal(ours: SpeechResult, theirs: Any, prompt_length: int) -> None:
    """Text equal token for token; audio, which every code goes into, within 1e-4."""
    sequences = theirs[0] if isinstance(theirs[0], torch.Tensor) else theirs[0].sequences
    text = sequences[0, prompt_length : prompt_length + TEXT_TOKENS].tolist()
    assert ours.token_ids == text, f"text differs: {ours.token_ids} and {text}"
    audio = theirs[1][0, 0].numpy()
    assert ours.audio.shape == audio.shape, f"{ours.audio.shape} and {audio.shape} samples"
    worst = float(np.abs(ours.audio - audio).max())
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
