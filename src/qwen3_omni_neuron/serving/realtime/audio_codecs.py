"""Codecs of realtime sound <-> float32 samples: 16-bit PCM, mu-law and A-law."""

import binascii
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pybase64
import soundfile
from numpy.typing import NDArray

from qwen3_omni_neuron.events.encoding import pcm16, samples_of_pcm16
from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value

TURN_RATE = 16000  # Hz of the sound in turns
MOST_SOUND_BYTES = 15 << 20  # per event
Samples = NDArray[np.float32]
_EMPTY = np.zeros(0, np.float32)
_LAWS = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}  # ITU-T G.711: names in libsndfile
_RAW: Any = {"samplerate": 8000, "channels": 1, "format": "RAW"}


@dataclass(frozen=True)
class Codec:
    """Format of sound on the socket."""

    rate: int
    bytes_per_sample: int
    decode: Callable[[bytes], Samples]
    encode: Callable[[Samples], bytes]


def codec_of(kind: str, rate: int | None) -> Codec:
    """Return the codec of a format such as "audio/pcm". rate: PCM's rate in Hz, default 24000."""
    if law := _LAWS.get(kind):
        return Codec(8000, 1, partial(_decode, law), partial(_encode, law))
    return Codec(rate or 24000, 2, samples_of_pcm16, pcm16)


def _decode(law: str, data: bytes) -> Samples:
    return soundfile.read(BytesIO(data), dtype="float32", subtype=law, **_RAW)[0]


def _encode(law: str, samples: Samples) -> bytes:
    # Rounded to a law's 14 or 13 bits; libsndfile truncates 16 bits towards 0.
    unit = 4 if law == "ULAW" else 8
    values = np.rint(samples.clip(-1, 1) * (32768 // unit - 1)).astype(np.int16) * unit
    if law == "ALAW":
        values += np.where(values < 0, 7, 0).astype(np.int16)  # -1 becomes 0
    file = BytesIO()
    with soundfile.SoundFile(file, "w", subtype=law, **_RAW) as coded:
        coded.write(values)
    return file.getvalue()


class Resampler:
    """Streaming resampler; equal rates change nothing."""

    def __init__(self, from_rate: int, to_rate: int):
        self._rates = from_rate, to_rate
        self._stream: Any = None

    def push(self, samples: Samples, last: bool = False) -> Samples:
        """Return the samples completed by a piece; with the last piece, all."""
        from_rate, to_rate = self._rates
        if from_rate == to_rate:
            return samples
        if self._stream is None:
            if not len(samples):
                return samples
            import soxr

            self._stream = soxr.ResampleStream(from_rate, to_rate, 1)
        made = self._stream.resample_chunk(samples, last=last)
        if last:
            self._stream = None
        return made

    def finish(self) -> Samples:
        """Return the remaining samples, and restart."""
        return self.push(_EMPTY, last=True)


def decoded_sound(text: str, codec: Codec, where: str) -> Samples:
    """Decode a client's base64 samples. Raises ApiError."""
    if len(text) > MOST_SOUND_BYTES // 3 * 4 + 4:
        message = f"{where} has more than {MOST_SOUND_BYTES} bytes, the most at once. Send less."
        raise ApiError(400, message, "audio_too_large", where)
    try:
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        message = f"{where} is not base64 ({error}). Encode the sound's bytes in one piece."
        raise ApiError(400, message, "invalid_base64", where) from error
    if len(data) % codec.bytes_per_sample:
        message = f"{where} has {len(data)} bytes, and a sample has {codec.bytes_per_sample}."
        raise wrong_value(message, where)
    return codec.decode(data)


def encoded_sound(samples: Samples, codec: Codec) -> str:
    """Encode samples at the codec's rate in base64."""
    # Resampled values may slightly exceed full scale.
    return pybase64.b64encode_as_string(codec.encode(samples.clip(-1, 1)))
