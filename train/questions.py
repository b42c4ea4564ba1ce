"""Random conversations in the training vocabulary, with their right replies."""

import random
from dataclasses import dataclass
from typing import Any

from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.prompt import Prompt as ModelPrompt
from train.speech import RATE, Variation, spoken_clip, wordless_clip
from train.vocabulary import (
    MOST_CHARACTERS,
    SORRY,
    SUMS,
    SYSTEMS,
    Prompt,
    prompts,
    random_sentence,
    typed,
    written,
)

SPOKEN_SHARE = 0.5
_WORDLESS_SHARE = 0.02  # of training's clips


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
    longest: int = MOST_CHARACTERS,
    known: bool | None = None,
) -> Question:
    """Draw a conversation.

    It may have a system turn, and its question is in speech or in text. earlier: number of turns
    before, about half of them in speech; None: now and then there is one, in text.
    sums, longest, known: see train.vocabulary.
    """
    spoken = rng.random() < SPOKEN_SHARE if spoken is None else spoken
    system = rng.choice(SYSTEMS) if rng.random() < 0.4 else None
    if rng.random() < 0.06:
        system = random_sentence(rng, held_out, rng.randrange(1, 9))
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
    (prompt,) = prompts(
        rng, 1, heard=spoken, held_out=held_out, sums=sums, longest=longest, known=known
    )
    if spoken and not held_out and rng.random() < _WORDLESS_SHARE:
        prompt = Prompt("", SORRY)
    messages.append(_user_turn(prompt, spoken, around, rng))
    return Question(messages, prompt, written(prompt.reply, system), spoken)


def _user_turn(
    prompt: Prompt, spoken: bool, around: Variation, rng: random.Random
) -> dict[str, Any]:
    if spoken:
        samples = spoken_clip(prompt.words, around, rng) if prompt.words else wordless_clip(rng)
        return {"role": "user", "content": [{"type": "audio", "audio": (samples, RATE)}]}
    return {"role": "user", "content": typed(prompt, rng)}
