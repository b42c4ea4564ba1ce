"""Random conversations in the training vocabulary, with their right replies."""

import random
from dataclasses import dataclass
from typing import Any

from qwen3_omni_neuron.conversation.prompt import Prompt as ModelPrompt
from qwen3_omni_neuron.conversation.template import Conversation
from train.speech import RATE, Variation, spoken_clip
from train.vocabulary import SUMS, SYSTEMS, Prompt, prompts, written

SPOKEN_SHARE = 0.65
_PUNCTUATION = ("", "", ".", "?", "!")


@dataclass(frozen=True)
class Question:
    """One conversation and its right reply."""

    messages: list[dict[str, Any]]
    prompt: Prompt
    reply: str
    spoken: bool

    def inputs(self, conversation: Conversation) -> ModelPrompt:
        """Return the model's inputs."""
        return conversation.prompt(self.messages)


def draw_question(
    rng: random.Random,
    around: Variation,
    *,
    held_out: bool = False,
    spoken: bool | None = None,
    sums: float = SUMS,
) -> Question:
    """Draw a conversation.

    It may have a system turn and an earlier turn, and its question is in speech or in text.
    """
    spoken = rng.random() < SPOKEN_SHARE if spoken is None else spoken
    system = rng.choice(SYSTEMS) if rng.random() < 0.4 else None
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    if rng.random() < 0.15:
        (earlier,) = prompts(rng, 1, heard=False, held_out=False)
        messages.append(_user_text(earlier, rng))
        messages.append({"role": "assistant", "content": written(earlier.reply, system)})
    (prompt,) = prompts(rng, 1, heard=spoken, held_out=held_out, sums=sums)
    if spoken:
        clip = {"type": "audio", "audio": (spoken_clip(prompt.words, around, rng), RATE)}
        messages.append({"role": "user", "content": [clip]})
    else:
        messages.append(_user_text(prompt, rng))
    return Question(messages, prompt, written(prompt.reply, system), spoken)


def _user_text(prompt: Prompt, rng: random.Random) -> dict[str, Any]:
    words = prompt.words.capitalize() if rng.random() < 0.3 else prompt.words
    return {"role": "user", "content": words + rng.choice(_PUNCTUATION)}
