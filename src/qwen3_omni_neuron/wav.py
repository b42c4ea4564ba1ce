"""A WAV file that is there whole, or not at all."""

import os
import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np
import soundfile
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import OutputError


class WavFile:
    """Claims a path before any work is done for it, writes beside it, and renames at the end.

    Used in a `with` block: leaving it with an error leaves whatever was at the path as it was.
    """

    def __init__(self, path: Path):
        self._path = path
        self._temporary = Path()

    def __enter__(self) -> "WavFile":
        """Raises OutputError when the path can't be written."""
        if self._path.is_dir():
            raise OutputError(f"{self._path} is a folder; name a file, such as speech.wav.")
        try:
            handle, name = tempfile.mkstemp(
                prefix=f".{self._path.name}.", suffix=".part", dir=self._path.parent
            )
        except OSError as error:
            raise OutputError(
                f"{self._path} can't be written ({error.strerror}). Choose a folder that exists "
                "and that you may write to."
            ) from error
        os.close(handle)
        self._temporary = Path(name)
        return self

    def write(self, samples: NDArray[np.float32], sample_rate: int) -> None:
        """Write 16-bit PCM. samples: float32 [samples] in [-1, 1]."""
        try:
            soundfile.write(self._temporary, samples, sample_rate, subtype="PCM_16", format="WAV")
            # mkstemp makes a private file; the finished one has the usual permissions.
            mask = os.umask(0)
            os.umask(mask)
            self._temporary.chmod(0o666 & ~mask)
            self._temporary.replace(self._path)
        except (OSError, soundfile.SoundFileError) as error:
            raise OutputError(f"{self._path} can't be written: {error}") from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._temporary.unlink(missing_ok=True)
