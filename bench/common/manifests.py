"""Manifests: files with one line of JSON for each conversation or clip.

Conversations: `{"id": "sky", "messages": [...]}`, messages as `Qwen3Omni.generate_audio` takes
them. Clips: `{"audio": "a.wav", "text": "its words"}`. Paths are relative to the manifest. A small
manifest of conversations, `bench/conversations.jsonl`, ships with the benchmarks.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from qwen3_omni_neuron.prompt.messages import MEDIA_KINDS, Messages, read_messages
from testing.command_line import InputError

Entry = TypeVar("Entry")

SHIPPED = Path(__file__).parents[1] / "conversations.jsonl"
CONVERSATION_FORM = (
    '{"id": "sky", "messages": [{"role": "user", "content": "What colour is the sky?"}]}'
)
CLIP_FORM = '{"audio": "a.wav", "text": "its words"}'


@dataclass(frozen=True)
class Conversation:
    """Messages to ask. name: unique in its manifest."""

    name: str
    messages: Messages


@dataclass(frozen=True)
class Clip:
    """An audio file, and its words as transcribed by a person."""

    audio: Path
    text: str


def read_conversations(manifest: Path) -> list[Conversation]:
    """Read a manifest of conversations, with the paths of media resolved.

    Raises InputError, which names the line, for a line that is no conversation, media that do not
    exist, and an id that an earlier line has.
    """
    names: set[str] = set()

    def check_media(kind: str, item: Mapping[str, Any], where: str) -> None:
        path = item.get(kind)
        if not isinstance(path, str):
            raise ValueError(f"{where} is {kind} without a path")
        if not (manifest.parent / path).is_file():
            raise ValueError(f"{where}: {manifest.parent / path} does not exist")

    def parse(entry: Any) -> Conversation:
        if not isinstance(entry, Mapping) or entry.keys() != {"id", "messages"}:
            raise ValueError("an object of id and messages is needed")
        name, messages = entry["id"], entry["messages"]
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError("the id is a word without a slash, which files are named after")
        if name in names:
            raise ValueError(f"an earlier line has the id {name!r}")
        names.add(name)
        read_messages(messages, (), check_media)
        return Conversation(name, _with_resolved_paths(messages, manifest.parent))

    return _read_entries(manifest, parse, CONVERSATION_FORM)


def read_clips(source: Path) -> list[Clip]:
    """Read the clips of a manifest, in its order, or of a LibriSpeech folder, sorted.

    source: a manifest, or a folder such as LibriSpeech/test-clean, with
    <speaker>/<chapter>/*.trans.txt beside the .flac files. Raises InputError for a source that
    can't be read, a line that is no clip, and a source without clips.
    """

    def parse(entry: Any) -> Clip:
        if not isinstance(entry, dict):
            raise ValueError(f"a {type(entry).__name__}")
        for key in ("audio", "text"):
            if not isinstance(entry.get(key), str):
                raise ValueError(f'"{key}" is no string')
        return Clip(source.parent / entry["audio"], entry["text"])

    return _read_librispeech(source) if source.is_dir() else _read_entries(source, parse, CLIP_FORM)


def _read_librispeech(folder: Path) -> list[Clip]:
    clips = []
    for transcripts in sorted(folder.glob("*/*/*.trans.txt")):
        for number, line in _numbered_lines(transcripts):
            name, _, text = line.partition(" ")
            if not text:
                raise InputError(f"{transcripts}:{number} is no name and words: {line[:80]}")
            clips.append(Clip(transcripts.parent / f"{name}.flac", text))
    if not clips:
        raise InputError(
            f"{folder} has no clips in */*/*.trans.txt; name the folder of one set, such as "
            "LibriSpeech/test-clean."
        )
    return clips


def _read_entries(file: Path, parse: Callable[[Any], Entry], form: str) -> list[Entry]:
    """Parse every line that is not blank. parse raises ValueError; form: an example, for errors."""
    entries = []
    for number, line in _numbered_lines(file):
        try:
            entries.append(parse(json.loads(line)))
        except ValueError as error:
            raise InputError(f"{file}:{number} is not {form}: {error}\n  {line[:80]}") from error
    if not entries:
        raise InputError(f"{file} is empty: it needs a line such as {form}.")
    return entries


def _numbered_lines(file: Path) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers from 1."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} can't be read: {error}") from error
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def _with_resolved_paths(messages: Messages, folder: Path) -> list[dict[str, Any]]:
    def resolved(item: Mapping[str, Any]) -> dict[str, Any]:
        kind = item["type"]
        return {**item, kind: str(folder / item[kind])} if kind in MEDIA_KINDS else {**item}

    return [
        {**m, "content": c if isinstance(c := m["content"], str) else [resolved(i) for i in c]}
        for m in messages
    ]
