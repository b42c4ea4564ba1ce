"""Comparison of whole replies, ours and the reference's."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qwen3_omni_neuron import Qwen3Omni, SpeechResult
from qwen3_omni_neuron.events import Finished

if TYPE_CHECKING:  # it imports transformers, which takes seconds
    from qwen3_omni_neuron.verification.oracle import Reference, ReferenceResult

GREEDY: dict[str, Any] = {
    "thinker_do_sample": False,
    "talker_do_sample": False,
    "predictor_do_sample": False,
}


def last(stream: Any) -> SpeechResult:
    """Return the result of a stream, read to its end."""
    *_, event = stream
    assert isinstance(event, Finished)
    return event.result


def assert_alike(ours: SpeechResult, theirs: SpeechResult, atol: float = 1e-5) -> None:
    """Assert that replies of ours have the same tokens, text and codes, and samples within atol."""
    assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
    assert ours.codes.tolist() == theirs.codes.tolist()
    np.testing.assert_allclose(ours.audio, theirs.audio, atol=atol, rtol=0)


def assert_same(ours: SpeechResult, theirs: "ReferenceResult", reference: "Reference") -> None:
    """Assert equal codes, then equal audio, since a wrong code would make wrong samples."""
    assert len(ours.codes) == len(theirs.codes)
    for frame, (mine, other) in enumerate(zip(ours.codes, theirs.codes.numpy(), strict=True)):
        assert mine.tolist() == other.tolist(), f"frame {frame} is the first that differs"
    audio = reference.decode(theirs.codes).numpy()
    assert ours.audio.shape == audio.shape
    assert np.abs(ours.audio - audio).max() < 1e-4


def assert_equal_replies(folder: Path, reference: "Reference") -> None:
    """Assert that a checkpoint's reply in float32 is the reference's."""
    messages = [{"role": "user", "content": "What colour is the sky?"}]
    with Qwen3Omni.load(folder, dtype="float32", max_concurrency=1) as omni:
        ours, theirs = reply_to_the_limit(omni, reference, messages, 8, talker_max_new_tokens=16)
    assert len(ours.codes) == 15
    assert_same(ours, theirs, reference)


def reply_to_the_limit(
    omni: Qwen3Omni,
    reference: "Reference",
    messages: Any,
    tokens: int,
    video_second_per_grid: tuple[float, ...] = (),
    **options: Any,
) -> "tuple[SpeechResult, ReferenceResult]":
    """Generate and speak `tokens` tokens with both.

    The reference does not speak the token that meets its limit, so its limit is one higher.
    """
    ours = omni.generate_audio(messages, thinker_max_new_tokens=tokens, **GREEDY, **options)
    prompt = omni.prompt_builder.prompt(messages, options.get("use_audio_in_video", False))
    if video_second_per_grid:
        options["video_second_per_grid"] = torch.tensor(video_second_per_grid)
    theirs = reference.generate(prompt, thinker_max_new_tokens=tokens + 1, **options)
    assert ours.token_ids == theirs.token_ids[:tokens]
    return ours, theirs
