"""Random conversations in the training vocabulary, with their right replies."""

import random
from dataclasses import dataclass
from typing import Any

from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.prompt import Prompt as ModelPrompt
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

    def inputs(self, prompt_builder: PromptBuilder) -> ModelPrompt:
        """Return the model's inputs."""
        return prompt_builder.prompt(self.messages)


def draw_question(
    rng: random.Random,
    around: Variation,
    *,
    held_out: bool = False,
    spoken: bool | None = None,
    sums: float = SUMS,
    earlier: int | None = None,
) -> Question:
    """Draw a conversation.

    It may have a system turn, and its question is in speech or in text. earlier: number of turns
    before, about half of them in speech; None: now and then there is one, in text.
    """
    spoken = rng.random() < SPOKEN_SHARE if spoken is None else spoken
    system = rng.choice(SYSTEMS) if rng.random() < 0.4 else None
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    if earlier is None:
        before = [False] * (rng.random() < 0.15)
    else:
        before = [rng.random() < 0.5 for _ in range(earlier)]
    for in_speech in before:
        (turn,) = prompts(rng, 1, heard=in_speech, held_out=False)
        messages.append(_user_turn(turn, in_speech, around, rng))
        messages.append({"role": "assistant", "content": written(turn.reply, system)})
    (prompt,) = prompts(rng, 1, heard=spoken, held_out=held_out, sums=sums)
    messages.append(_user_turn(prompt, spoken, around, rng))
    return Question(messages, prompt, written(prompt.reply, system), spoken)


def _user_turn(
    prompt: Prompt, spoken: bool, around: Variation, rng: random.Random
) -> dict[str, Any]:
    if spoken:
        clip = {"type": "audio", "audio": (spoken_clip(prompt.words, around, rng), RATE)}
        return {"role": "user", "content": [clip]}
    words = prompt.words.capitalize() if rng.random() < 0.3 else prompt.words
    return {"role": "user", "content": words + rng.choice(_PUNCTUATION)}
