"""Sound files with what is said in them, from a manifest or a LibriSpeech folder."""

import json
from dataclasses import dataclass
from pathlib import Path


class ManifestError(Exception):
    """There is nothing to transcribe, or it can't be told what."""


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
    clips = []
    for number, line in _lines(source):
        try:
            entry = json.loads(line)
            audio, text = entry["audio"], entry["text"]
        except (ValueError, TypeError, KeyError):
            audio = text = None
        if not isinstance(audio, str) or not isinstance(text, str):
            raise ManifestError(
                f'{source}:{number} is not {{"audio": "a.wav", "text": "its words"}}: {line[:80]}'
            )
        clips.append(Clip(source.parent / audio, text))
    if not clips:
        raise ManifestError(f"{source} is empty: one line of JSON a clip is needed.")
    return clips


def _read_librispeech(folder: Path) -> list[Clip]:
    clips = []
    for transcripts in sorted(folder.glob("*/*/*.trans.txt")):
        for number, line in _lines(transcripts):
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


def _lines(file: Path) -> list[tuple[int, str]]:
    """Lines that are not blank, and their numbers from 1."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{file} can't be read: {error}") from error
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
