"""Codecs of realtime sound <-> float32 samples: 16-bit PCM, and telephony's mu-law and A-law."""

import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from qwen3_omni_neuron.events.encoding import pcm16, samples_of_pcm16
from qwen3_omni_neuron.serving.openai.errors import ApiError, wrong_value

TURN_RATE = 16000  # sample rate of the sound in turns
MOST_SOUND_BYTES = 15 << 20  # limit of one event
Samples = NDArray[np.float32]
_EMPTY = np.zeros(0, np.float32)
_MU_BIAS, _MU_CLIP = 33, 8158  # for 14-bit samples


@dataclass(frozen=True)
class Codec:
    """Format of sound on the socket."""

    rate: int
    bytes_per_sample: int
    decode: Callable[[bytes], Samples]
    encode: Callable[[Samples], bytes]


def codec_of(kind: str, rate: int | None) -> Codec:
    """Return the codec of a format such as "audio/pcm". rate: PCM's rate in Hz, default 24000."""
    if kind == "audio/pcmu":
        return Codec(8000, 1, lambda data: _MU_TABLE[np.frombuffer(data, np.uint8)], encode_mu_law)
    if kind == "audio/pcma":
        return Codec(8000, 1, lambda data: _A_TABLE[np.frombuffer(data, np.uint8)], encode_a_law)
    return Codec(rate or 24000, 2, samples_of_pcm16, pcm16)


def encode_mu_law(samples: Samples) -> bytes:
    """Encode as ITU-T G.711 mu-law, a byte a sample."""
    values = np.rint(samples.clip(-1, 1) * 8191).astype(np.int32)
    size = np.minimum(np.abs(values), _MU_CLIP) + _MU_BIAS
    segment = np.floor(np.log2(size)).astype(np.int32) - 5
    code = (segment << 4) | ((size >> (segment + 1)) & 15)
    return (~(code | np.where(values < 0, 128, 0)) & 255).astype(np.uint8).tobytes()


def encode_a_law(samples: Samples) -> bytes:
    """Encode as ITU-T G.711 A-law, a byte a sample."""
    values = np.rint(samples.clip(-1, 1) * 4095).astype(np.int32)
    size = np.where(values < 0, -values - 1, values)
    segment = np.maximum(np.floor(np.log2(np.maximum(size, 1))).astype(np.int32) - 4, 0)
    code = (segment << 4) | ((size >> np.maximum(segment, 1)) & 15)
    return ((code | np.where(values < 0, 0, 128)) ^ 0x55).astype(np.uint8).tobytes()


class Resampler:
    """Streaming resampler. For equal rates it changes nothing."""

    def __init__(self, from_rate: int, to_rate: int):
        self._rates = from_rate, to_rate
        self._stream: Any = None

    def push(self, samples: Samples, last: bool = False) -> Samples:
        """Add a piece and return the samples that it completes; after the last piece, all."""
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
        """Return the remaining samples, and begin a new stream."""
        return self.push(_EMPTY, last=True)


def _mu_table() -> Samples:
    code = ~np.arange(256) & 255
    segment, step = (code >> 4) & 7, code & 15
    size = (((step << 1) + _MU_BIAS) << segment) - _MU_BIAS
    return (np.where(code & 128, -size, size) / 8192).astype(np.float32)


def _a_table() -> Samples:
    code = np.arange(256) ^ 0x55
    segment, step = (code >> 4) & 7, code & 15
    size = np.where(segment, ((step << 1) + 33) << np.maximum(segment - 1, 0), (step << 1) + 1)
    return (np.where(code & 128, size, -size) / 4096).astype(np.float32)


_MU_TABLE, _A_TABLE = _mu_table(), _a_table()


def decoded_sound(text: str, codec: Codec, where: str) -> Samples:
    """Decode samples that a client sent in base64. Raises ApiError."""
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
    # A resampled value may slightly exceed full scale.
    return pybase64.b64encode_as_string(codec.encode(samples.clip(-1, 1)))
