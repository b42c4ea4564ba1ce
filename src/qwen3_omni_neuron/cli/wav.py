"""WAV output that appears at its path only when it is complete."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
import soundfile
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import OutputError


class WavFile:
    """WAV file that is written under a temporary name and renamed when it is complete.

    Used in a `with` block, which checks at its start that the folder can be written. An error in
    the block leaves an earlier file at the path unchanged. 16-bit PCM, mono.
    """

    def __init__(self, path: Path, sample_rate: int):
        self._path, self._sample_rate = path, sample_rate
        self._temporary = Path()
        self._file: soundfile.SoundFile | None = None

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
        with self._output_errors():
            encoded = os.fsencode(self._temporary)  # soundfile takes no name that is not UTF-8
            self._file = soundfile.SoundFile(
                encoded, "w", self._sample_rate, 1, "PCM_16", format="WAV"
            )
        return self

    def write(self, samples: NDArray[np.float32]) -> None:
        """Append float32 [samples] in [-1, 1]."""
        assert self._file is not None, "within a `with` block"
        with self._output_errors():
            self._file.write(samples)
            self._file.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._output_errors():
                if self._file is not None:
                    self._file.close()
                if kind is None:
                    self._rename()
        finally:
            self._temporary.unlink(missing_ok=True)

    def _rename(self) -> None:
        # mkstemp makes a private file; the finished one has the usual permissions.
        mask = os.umask(0)
        os.umask(mask)
        self._temporary.chmod(0o666 & ~mask)
        self._temporary.replace(self._path)

    @contextmanager
    def _output_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, soundfile.SoundFileError) as error:
            raise OutputError(f"{self._path} can't be written: {error}") from error
