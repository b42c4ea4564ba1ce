"""Prompts made by hand."""

import torch

from qwen3_omni_neuron.model.config import ASSISTANT_ROWS
from qwen3_omni_neuron.prompt.positions import rope_positions
from qwen3_omni_neuron.prompt.prompt import Prompt, TalkerPrompt


def prompt_of(token_ids: torch.Tensor) -> Prompt:
    """Return a prompt of user tokens alone, without media."""
    rows = len(token_ids) + ASSISTANT_ROWS
    talker = TalkerPrompt(token_ids, rope_positions(rows))
    return Prompt(token_ids, rope_positions(len(token_ids)), talker)
