"""Sound as the caller has it -> 16 kHz mono float32, checked."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import AudioError

Waveform = NDArray[np.float32]
MIN_SECONDS = 0.03  # shorter than this gives less than a handful of mel frames: nothing to hear


def load_waveform(item: Mapping[str, Any], rate: int, where: str) -> Waveform:
    """The sound of one audio item of a message, mono float32 [samples] at `rate` Hz.

    item["audio"] is a path, the bytes of a sound file, an array [samples] or [samples, channels]
    (with item["sampling_rate"]; integers are scaled by their range), or (array, rate).
    where: names the item in errors, e.g. "messages[0].content[1]".
    Raises AudioError when it can't be read, is empty, too short, or holds NaN or infinity.
    """
    source = item.get("audio")
    if isinstance(source, tuple) and len(source) == 2:
        source, source_rate = source
    else:
        source_rate = item.get("sampling_rate")
    if isinstance(source, str | Path | bytes | bytearray):
        samples, source_rate = _read_file(source, where)
    elif source is None:
        raise AudioError(f'{where} has no "audio": give a path, bytes, or an array.')
    else:
        samples = _from_array(source, where)
        if not isinstance(source_rate, int | float) or source_rate <= 0:
            raise AudioError(
                f"{where} is an array without its sampling_rate (got {source_rate!r}). "
                'Add "sampling_rate": 16000, or whatever its rate is, in Hz.'
            )
    return _checked(_mono(samples, where), float(source_rate), rate, where)


def _read_file(source: str | Path | bytes | bytearray, where: str) -> tuple[NDArray[Any], float]:
    in_memory = isinstance(source, bytes | bytearray)
    name = f"{len(source)} bytes" if isinstance(source, bytes | bytearray) else str(source)
    if not in_memory and not Path(name).exists():
        raise AudioError(f"{where}: {name} does not exist.")
    try:
        file = io.BytesIO(source) if isinstance(source, bytes | bytearray) else source
        return soundfile.read(file, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise AudioError(
            f"{where}: {name} can't be read as sound ({error}). WAV, FLAC, OGG and MP3 can."
        ) from error


def _from_array(source: Any, where: str) -> NDArray[Any]:
    try:
        samples = np.asarray(source)
    except (ValueError, TypeError, RuntimeError) as error:
        raise AudioError(f"{where} is neither a path, bytes nor an array: {error}") from error
    if np.issubdtype(samples.dtype, np.integer):
        info = np.iinfo(samples.dtype)
        middle = (int(info.max) + int(info.min) + 1) // 2  # 128 where unsigned, 0 where signed
        samples = (samples - float(middle)) / (float(info.max) - middle + 1)
    elif not np.issubdtype(samples.dtype, np.floating):
        raise AudioError(f"{where} is an array of {samples.dtype}; numbers are needed.")
    return samples.astype(np.float32)


def _mono(samples: NDArray[Any], where: str) -> Waveform:
    if samples.ndim == 2:
        # More channels than samples: [channels, samples], as torchaudio has it.
        channels = 0 if samples.shape[0] < samples.shape[1] else 1
        samples = samples.mean(axis=channels) if samples.size else samples.reshape(-1)
    elif samples.ndim != 1:
        raise AudioError(
            f"{where} has shape {list(samples.shape)}; give [samples] or [samples, channels]."
        )
    return samples.astype(np.float32)


def _checked(samples: Waveform, source_rate: float, rate: int, where: str) -> Waveform:
    if not np.isfinite(samples).all():
        bad = int((~np.isfinite(samples)).sum())
        raise AudioError(f"{where}: {bad} of {len(samples)} samples are NaN or infinite.")
    seconds = len(samples) / source_rate
    if seconds < MIN_SECONDS:
        raise AudioError(
            f"{where} lasts {seconds:.3f} s ({len(samples)} samples); {MIN_SECONDS} s is the least."
        )
    if source_rate != rate:
        samples = soxr.resample(samples, source_rate, rate)
    return np.ascontiguousarray(samples, dtype=np.float32)
