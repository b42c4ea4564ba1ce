"""Make a manifest of conversations, and their audio, from a seed.

    python -m bench.make_conversations FOLDER --count 40 --seed 0

They vary in length, in text and audio, in system turns and in earlier turns; their audio is tones,
noise, and cuts and repetitions of the example's question. The same seed gives the same bytes. For
the form of the manifest see bench/common/manifests.py.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from bench.common.command_line import natural, parser_of, positive

QUESTION = Path(__file__).parents[1] / "examples" / "question.wav"
MANIFEST_NAME = "conversations.jsonl"
RATE = 16000
TOPICS = (
    *("the sky", "old maps", "how bread rises", "trains at night", "a good question", "rivers"),
    *("the number seven", "winter", "why cats sleep so much", "small boats", "music", "glass"),
)
OPENINGS = ("Tell me about", "What do you know about", "Please explain", "Say something about")
FILLER = (
    "and take your time with it, since I have never heard of it before",
    "in words that a child would understand",
    "as you would to somebody who has just come home from a long day",
    "and do not leave out how it began",
    "with one example from far away and one from close by",
)
SYSTEM_TURNS = (
    "You are a helpful assistant. Answer in one short sentence.",
    "You speak on the telephone. Keep every answer brief, and never spell out a list.",
)


def write_conversations(folder: Path, count: int, seed: int) -> Path:
    """Make conversations and their audio files. Returns the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        name = f"made-{seed}-{number:04}"
        lines.append(json.dumps({"id": name, "messages": _random_messages(draw, folder, name)}))
    manifest = folder / MANIFEST_NAME
    manifest.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return manifest


def _random_messages(draw: random.Random, folder: Path, name: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": draw.choice(SYSTEM_TURNS)})
    for _ in range(draw.choice((0, 0, 0, 1, 2))):  # earlier turns
        messages.append({"role": "user", "content": _random_text(draw)})
        messages.append({"role": "assistant", "content": f"About {draw.choice(TOPICS)}, then."})
    if draw.random() < 0.5:
        return [*messages, {"role": "user", "content": _random_text(draw)}]
    audio = folder / f"{name}.wav"
    soundfile.write(audio, _random_audio(draw), RATE, "PCM_16")
    content = [{"type": "audio", "audio": audio.name}]
    if draw.random() < 0.5:
        content.append({"type": "text", "text": _random_text(draw)})
    return [*messages, {"role": "user", "content": content}]


def _random_text(draw: random.Random) -> str:
    """Draw a request of 5 to some 200 words, short ones more often."""
    words = [f"{draw.choice(OPENINGS)} {draw.choice(TOPICS)}"]
    words += [draw.choice(FILLER) for _ in range(draw.choice((0, 0, 1, 2, 4, 16)))]
    return ", ".join(words) + "."


def _random_audio(draw: random.Random) -> NDArray[np.float32]:
    """Draw 0.4 to 20 s of audio, float32 [samples], short ones more often."""
    seconds = draw.choice((0.5, 1, 2, 3, 5, 8, 12, 20)) * draw.uniform(0.8, 1)
    samples = int(seconds * RATE)
    kind = draw.choice(("question", "question", "tone", "noise"))
    if kind == "question":
        speech, _ = soundfile.read(QUESTION, dtype="float32")
        return np.resize(speech, samples)
    if kind == "tone":
        times = np.arange(samples, dtype=np.float32) / RATE
        return np.float32(0.3) * np.sin(np.float32(2 * np.pi * draw.uniform(80, 2000)) * times)
    noise = np.random.default_rng(draw.randrange(2**32)).standard_normal(samples, np.float32)
    return np.float32(0.05) * noise


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the conversations, and print the manifest's path."""
    parser = parser_of("make_conversations", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=positive, default=40)
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args(arguments)
    print(write_conversations(options.folder, options.count, options.seed))


if __name__ == "__main__":
    main()
