"""Conversations to ask: read from a manifest, or made by a seed.

    python -m bench.common.conversations FOLDER --count 40 --seed 0

A manifest has one line of JSON a conversation, {"id": "sky", "messages": [...]}: messages as
`Qwen3Omni.generate_audio` takes them, paths of media relative to the manifest. A small one,
`conversations.jsonl`, lies beside this file. Those that are made vary in length, in text and sound,
in system turns and in turns before; their sounds are tones, noise, and cuts and loops of the
example's question. The same seed gives the same bytes.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from bench.common.arguments import natural, positive
from bench.common.json_lines import read_entries
from qwen3_omni_neuron.conversation.messages import MEDIA_KINDS, Messages, read_messages

BENCH = Path(__file__).parents[1]
SHIPPED = BENCH / "conversations.jsonl"
QUESTION = BENCH.parent / "examples" / "question.wav"
FORM = '{"id": "sky", "messages": [{"role": "user", "content": "What colour is the sky?"}]}'
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


@dataclass(frozen=True)
class Conversation:
    """What is asked. name: tells it from the others of its manifest."""

    name: str
    messages: Messages


def read_conversations(manifest: Path) -> list[Conversation]:
    """The conversations of a manifest, paths made whole. Raises ManifestError, which names the
    line: one that is no conversation, media that are not there, a name that came before."""
    names: set[str] = set()

    def parse(entry: Any) -> Conversation:
        if not isinstance(entry, Mapping) or entry.keys() != {"id", "messages"}:
            raise ValueError("an object of id and messages is needed")
        name, messages = entry["id"], entry["messages"]
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError("the id is a word without a slash, which files are named after")
        if name in names:
            raise ValueError(f"the id {name!r} stands on a line before")
        names.add(name)
        read_messages(messages, (), lambda kind, item, where: _there(manifest, kind, item, where))
        return Conversation(name, _with_whole_paths(messages, manifest.parent))

    return read_entries(manifest, parse, FORM)


def write_conversations(folder: Path, count: int, seed: int) -> Path:
    """Make conversations and their sounds. Returns the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        name = f"made-{seed}-{number:04}"
        lines.append(json.dumps({"id": name, "messages": _made_messages(draw, folder, name)}))
    manifest = folder / MANIFEST_NAME
    manifest.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return manifest


def _there(manifest: Path, kind: str, item: Mapping[str, Any], where: str) -> None:
    path = item.get(kind)
    if not isinstance(path, str):
        raise ValueError(f"{where} is {kind} without a path")
    if not (manifest.parent / path).is_file():
        raise ValueError(f"{where}: {manifest.parent / path} is not there")


def _with_whole_paths(messages: Messages, folder: Path) -> list[dict[str, Any]]:
    def whole(item: Mapping[str, Any]) -> dict[str, Any]:
        kind = item["type"]
        return {**item, kind: str(folder / item[kind])} if kind in MEDIA_KINDS else {**item}

    return [
        {**m, "content": c if isinstance(c := m["content"], str) else [whole(i) for i in c]}
        for m in messages
    ]


def _made_messages(draw: random.Random, folder: Path, name: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": draw.choice(SYSTEM_TURNS)})
    for _ in range(draw.choice((0, 0, 0, 1, 2))):  # turns before
        messages.append({"role": "user", "content": _made_text(draw)})
        messages.append({"role": "assistant", "content": f"About {draw.choice(TOPICS)}, then."})
    if draw.random() < 0.5:
        return [*messages, {"role": "user", "content": _made_text(draw)}]
    sound = folder / f"{name}.wav"
    soundfile.write(sound, _made_sound(draw), RATE, "PCM_16")
    content = [{"type": "audio", "audio": sound.name}]
    if draw.random() < 0.5:
        content.append({"type": "text", "text": _made_text(draw)})
    return [*messages, {"role": "user", "content": content}]


def _made_text(draw: random.Random) -> str:
    """A request of 5 to some 200 words, short ones more often."""
    words = [f"{draw.choice(OPENINGS)} {draw.choice(TOPICS)}"]
    words += [draw.choice(FILLER) for _ in range(draw.choice((0, 0, 1, 2, 4, 16)))]
    return ", ".join(words) + "."


def _made_sound(draw: random.Random) -> NDArray[np.float32]:
    """0.5 to 20 s, short ones more often."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=positive, default=40)
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args(arguments)
    print(write_conversations(options.folder, options.count, options.seed))


if __name__ == "__main__":
    main()
