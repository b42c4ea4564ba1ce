"""Sound files with what is said in them, from a manifest or a LibriSpeech folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.json_lines import ManifestError, numbered_lines, read_entries


@dataclass(frozen=True)
class Clip:
    """A sound file, and its words as a person wrote them down."""

    audio: Path
    text: str


def read_clips(source: Path) -> list[Clip]:
    """The clips of a manifest, in its order, or of a LibriSpeech folder, sorted.

    source: a file of JSON lines {"audio": path, "text": words}, paths relative to it; or a folder
    such as LibriSpeech/test-clean, with <speaker>/<chapter>/*.trans.txt beside the .flac files.
    Raises ManifestError for a source that can't be read, a line that says something else, and
    where there is no clip.
    """
    if source.is_dir():
        return _read_librispeech(source)
    clips = read_entries(source, _clip, '{"audio": "a.wav", "text": "its words"}')
    return [Clip(source.parent / clip.audio, clip.text) for clip in clips]


def _clip(entry: Any) -> Clip:
    """An entry, its path as it stands there."""
    if not isinstance(entry, dict):
        raise ValueError(f"a {type(entry).__name__}")
    for key in ("audio", "text"):
        if not isinstance(entry.get(key), str):
            raise ValueError(f'"{key}" is no string')
    return Clip(Path(entry["audio"]), entry["text"])


def _read_librispeech(folder: Path) -> list[Clip]:
    clips = []
    for transcripts in sorted(folder.glob("*/*/*.trans.txt")):
        for number, line in numbered_lines(transcripts):
            name, _, text = line.partition(" ")
            if not text:
                raise ManifestError(f"{transcripts}:{number} is no name and words: {line[:80]}")
            clips.append(Clip(transcripts.parent / f"{name}.flac", text))
    if not clips:
        raise ManifestError(
            f"{folder} has no clips in */*/*.trans.txt; name the folder of one set, such as "
            "LibriSpeech/test-clean."
        )
    return clips
