"""Prompts of sessions, and whether two prompts are the same."""

import numpy as np
import torch

from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.session import Session


def assert_same_prompt(ours: Prompt, whole: Prompt) -> None:
    """Assert that prompts are equal in every bit."""
    assert ours.token_ids.tolist() == whole.token_ids.tolist()
    assert torch.equal(ours.positions, whole.positions)
    assert torch.equal(ours.talker.token_ids, whole.talker.token_ids)
    assert torch.equal(ours.talker.positions, whole.talker.positions)
    assert len(ours.audio_mel) == len(whole.audio_mel)
    for number, (mel, expected) in enumerate(zip(ours.audio_mel, whole.audio_mel, strict=True)):
        assert torch.equal(mel, expected), f"clip {number} has other features"
    for mine, other in zip(ours.images + ours.videos, whole.images + whole.videos, strict=True):
        assert mine.grid == other.grid
        assert np.array_equal(mine.pixels, other.pixels)


def prompt_of(session: Session) -> Prompt:
    """Return the prompt of a session's turns so far."""
    return session._prompt(session._conversation(), session._options)
