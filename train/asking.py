"""Conversations about this world: what is asked and how, as the model's own inputs."""

import random
from dataclasses import dataclass
from typing import Any

from qwen3_omni_neuron.conversation.prompt import Prompt as ModelPrompt
from qwen3_omni_neuron.conversation.template import Conversation
from train.hearing import RATE, Surroundings, heard
from train.world import SUMS, SYSTEMS, Prompt, prompts, written

HEARD_SHARE = 0.65
_MARKS = ("", "", ".", "?", "!")


@dataclass(frozen=True)
class Asked:
    """One conversation and its right reply."""

    messages: list[dict[str, Any]]
    prompt: Prompt
    reply: str
    spoken: bool

    def inputs(self, conversation: Conversation) -> ModelPrompt:
        """What the models take."""
        return conversation.prompt(self.messages)


def asked(
    rng: random.Random,
    around: Surroundings,
    *,
    held_out: bool = False,
    spoken: bool | None = None,
    sums: float = SUMS,
) -> Asked:
    """Any conversation: a system turn or none, an earlier turn or none, a question in speech or
    in text."""
    spoken = rng.random() < HEARD_SHARE if spoken is None else spoken
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
        sound = {"type": "audio", "audio": (heard(prompt.words, around, rng), RATE)}
        messages.append({"role": "user", "content": [sound]})
    else:
        messages.append(_user_text(prompt, rng))
    return Asked(messages, prompt, written(prompt.reply, system), spoken)


def _user_text(prompt: Prompt, rng: random.Random) -> dict[str, Any]:
    words = prompt.words.capitalize() if rng.random() < 0.3 else prompt.words
    return {"role": "user", "content": words + rng.choice(_MARKS)}
