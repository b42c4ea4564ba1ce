"""Questions for the reference and the model: text, sound, an image."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SOUND_RATE = 16000
TEXTS = (
    "What is six plus two?",
    "What colour is the sky?",
    "Count from one to ten.",
    "Name three animals that can fly.",
    "Translate to French: good morning, my friend.",
    "Write one sentence about the sea.",
    "Which is larger, 9.11 or 9.9?",
    "Say: the quick brown fox jumps over the lazy dog.",
)
SPOKEN = ("What is six plus two?", "What colour is grass?")
DESCRIBE = "What is in the picture?"


@dataclass(frozen=True)
class Question:
    """A user's message.

    sound: float32 [samples] in [-1, 1] at SOUND_RATE. picture: uint8 [height, width, 3].
    """

    text: str = ""
    sound: NDArray[np.float32] | None = None
    picture: NDArray[np.uint8] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Its conversation."""
        content: list[dict[str, Any]] = []
        if self.sound is not None:
            content.append({"type": "audio", "audio": self.sound, "sampling_rate": SOUND_RATE})
        if self.picture is not None:
            content.append({"type": "image", "image": self.picture})
        if self.text:
            content.append({"type": "text", "text": self.text})
        return [{"role": "user", "content": content}]

    @property
    def title(self) -> str:
        """Short description."""
        media = [("sound", self.sound), ("picture", self.picture)]
        parts = [kind for kind, given in media if given is not None]
        return " + ".join([*parts, repr(self.text)] if self.text else parts)


def make_questions() -> list[Question]:
    """Make twelve questions."""
    picture = draw_picture()
    first, second = (speak(text, seed) for seed, text in enumerate(SPOKEN))
    return [
        Question(sound=first),
        Question(picture=picture, text=DESCRIBE),
        Question(sound=second, picture=picture),
        *(Question(text) for text in TEXTS),
        Question("Answer the question.", sound=second),
    ]


def draw_picture() -> NDArray[np.uint8]:
    """Draw a red disc over a gradient, uint8 [96, 128, 3]."""
    rows, columns = np.mgrid[:96, :128]
    picture = np.stack((rows * 2, columns, 255 - columns), -1).astype(np.uint8)
    picture[(rows - 48) ** 2 + (columns - 64) ** 2 < 900] = (220, 30, 30)
    return picture


def speak(text: str, seed: int = 0) -> NDArray[np.float32]:
    """Speak a text by the checkpoint that ships with the package, float32 at SOUND_RATE."""
    import soxr

    from qwen3_omni_neuron.api import Qwen3Omni
    from qwen3_omni_neuron.checkpoint import SPEAKING_CHECKPOINT

    with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=1) as omni:
        result = omni.say(text, seed=seed, talker_max_new_tokens=60)
    sound: NDArray[np.float32] = soxr.resample(result.audio, result.sample_rate, SOUND_RATE)
    return sound.clip(-1, 1)
