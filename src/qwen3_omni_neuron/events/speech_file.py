"""Output file of speech, which appears only when complete."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
import soundfile
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import OutputError
from qwen3_omni_neuron.events.encoding import SoundWriter

_FORMATS = {
    **{".wav": "wav", ".mp3": "mp3", ".flac": "flac"},
    **{".opus": "opus", ".ogg": "opus", ".pcm": "pcm16"},
}
SUFFIXES = ", ".join(_FORMATS)
"""File extensions of a SpeechFile, for messages."""


class SpeechFile:
    """Sound file, renamed from a temporary name when complete.

    The extension selects the format (SUFFIXES). Use `with`: errors leave an earlier file unchanged.
    """

    def __init__(self, path: Path, sample_rate: int):
        """Raises OutputError for an unknown extension, or a folder."""
        if path.is_dir():
            raise OutputError(f"{path} is a folder; name a file, such as speech.wav.")
        found = _FORMATS.get(path.suffix.lower())
        if found is None:
            kind = (
                f"has the extension {path.suffix}, which is not supported"
                if path.suffix
                else "has no file extension"
            )
            raise OutputError(f"{path} {kind}. End the name with one of {SUFFIXES}.")
        self._path, self._sample_rate, self._format = path, sample_rate, found
        self._temporary = Path()
        self._writer: SoundWriter | None = None

    def __enter__(self) -> "SpeechFile":
        """Raises OutputError when the path can't be written."""
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.part")
        try:
            self._temporary.touch(exist_ok=False)
        except (OSError, ValueError) as error:  # a ValueError for a zero byte in the name
            said = error.strerror if isinstance(error, OSError) else error
            raise OutputError(
                f"{self._path} can't be written ({said}). Choose a writable folder."
            ) from error
        try:
            with self._output_errors():
                encoded = os.fsencode(self._temporary)  # soundfile accepts only UTF-8 names
                self._writer = SoundWriter(encoded, self._sample_rate, self._format)
        except OutputError:
            self._temporary.unlink()
            raise
        return self

    def write(self, samples: NDArray[np.float32]) -> None:
        """Append float32 [samples] in [-1, 1]."""
        assert self._writer is not None, "within a `with` block"
        with self._output_errors():
            self._writer.write(samples)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._output_errors():
                if self._writer is not None:
                    self._writer.close()
                if kind is None:
                    self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)

    @contextmanager
    def _output_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, soundfile.SoundFileError) as error:
            raise OutputError(f"{self._path} can't be written: {error}") from error
