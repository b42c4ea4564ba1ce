"""Conversations with every kind of media, small enough for a tiny checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from testing.tiny import write_tiny_checkpoint
from testing.tiny.sizes import SIZES, resized

QUESTION_WAV = Path(__file__).parents[1] / "examples" / "question.wav"
RATE = 16000
Item = dict[str, Any]


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return noise over a colour gradient."""
    noise = np.random.default_rng(seed).integers(0, 100, (height, width, 3))
    slope = np.linspace(0, 155, width)[None, :, None]
    return Image.fromarray((noise + slope).astype(np.uint8))


def noise_frames(frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """Return different images, uint8 [frames, height, width, 3]."""
    return np.stack([np.asarray(noise_image(width, height, 100 * seed + i)) for i in range(frames)])


def tone(seconds: float, hz: float = 300.0) -> np.ndarray:
    """Return a tone with a beat, float32 [samples] at 16 kHz."""
    t = np.arange(round(seconds * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * hz * t) * np.sin(3 * t + 1)).astype(np.float32)


def text(words: str) -> Item:
    return {"type": "text", "text": words}


def image(width: int, height: int, seed: int = 0) -> Item:
    return {"type": "image", "image": noise_image(width, height, seed)}


def audio(seconds: float, hz: float = 300.0) -> Item:
    return {"type": "audio", "audio": tone(seconds, hz), "sampling_rate": RATE}


def video(frames: int, fps: float, seconds: float | None = None, size: int = 64) -> Item:
    """Return a video. seconds: length of its own audio; None for no audio."""
    item = {
        "type": "video",
        "video": noise_frames(frames, size, 96),
        "fps": fps,
        "min_pixels": 1024,
    }
    if seconds is not None:
        item |= {"audio": tone(seconds, 500.0), "sampling_rate": RATE}
    return item


CLIP = {"type": "audio", "audio": str(QUESTION_WAV)}


def user(*items: Item) -> Item:
    return {"role": "user", "content": list(items)}


def assistant(words: str) -> Item:
    return {"role": "assistant", "content": words}


@dataclass(frozen=True)
class Case:
    """A conversation. seconds_per_grid: a value for each of its videos, in order."""

    messages: list[Item]
    seconds_per_grid: tuple[float, ...] = ()
    use_audio_in_video: bool = False


IMAGE = image(96, 64)
CASES = {
    "image": Case([user(IMAGE, text("What is it?"))]),
    "three-images": Case(
        [user(image(96, 64, 1), image(64, 128, 2), text("and"), image(160, 96, 3))]
    ),
    "four-images": Case([user(*(image(64 + 32 * i, 96, i) for i in range(4)))]),
    "image-and-audio": Case([user(IMAGE, audio(1.3), text("Is that its sound?"))]),
    "audio-and-image": Case([user(audio(1.3), text("Who says that?"), IMAGE)]),
    "two-clips": Case([user(audio(1.7), audio(2.1, 700.0), text("Which is higher?"))]),
    "video": Case([user(video(6, 2.0), text("What happens?"))], (1.0,)),
    "video-of-odd-rate": Case([user(video(6, 1.7), text("What happens?"))], (2 / 1.7,)),
    "video-heard": Case([user(video(6, 2.0, 2.4), text("What is said?"))], (1.0,), True),
    "video-heard-for-longer": Case([user(video(4, 2.0, 4.1))], (1.0,), True),
    "video-heard-for-less": Case([user(video(8, 2.0, 1.2), audio(1.5))], (1.0,), True),
    "wide-video-heard": Case([user(video(2, 2.0, 1.0, size=640))], (1.0,), True),
    "video-not-heard": Case([user(video(6, 2.0, 2.4), text("What is seen?"))], (1.0,)),
    "video-heard-and-image": Case([user(video(4, 2.0, 2.4), IMAGE)], (1.0,), True),
    "image-and-video-heard": Case([user(IMAGE, video(4, 2.0, 2.4))], (1.0,), True),
    "two-videos": Case([user(video(4, 2.0), text("or"), video(2, 1.0, size=96))], (1.0, 2.0)),
    "image-and-video": Case([user(IMAGE, video(4, 2.0), audio(1.1))], (1.0,)),
    "five-turns": Case(
        [
            {"role": "system", "content": "Be brief."},
            user(IMAGE, text("What is this?")),
            assistant("A slope."),
            user(audio(1.1), text("And this?")),
            assistant("A tone."),
            user(image(64, 64, 5), CLIP, text("And these?")),
        ]
    ),
    "users-in-a-row": Case(
        [
            user(IMAGE),
            assistant(""),
            user(audio(0.6)),
            user(text("Well?")),
            assistant("Hm."),
            user(),
            user(text("So?")),
        ]
    ),
}


def write_deeper_checkpoint(folder: Path) -> Path:
    """Write a tiny checkpoint for comparisons with images and videos.

    As in the release, its accept layer lies above the layers that deepstack adds to. Otherwise 4.57
    would return hidden states after deepstack's addition, and 5.x those before it.
    """
    thinker = {"text_config": {"num_hidden_layers": 5}}
    talker = {"accept_hidden_layer": 4}
    size = resized(SIZES["tiny"], {"thinker_config": thinker, "talker_config": talker})
    return write_tiny_checkpoint(folder, seed=1, size=size)
