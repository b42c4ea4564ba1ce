"""Deltas of a streamed chat completion: of written and spoken answers, and as vllm-omni's are.

Clients of vllm-omni read `content`: text or a whole WAV file in base64, depending on the top-level
`modality`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pybase64

from qwen3_omni_neuron.events import SAMPLE_RATE, AudioChunk
from qwen3_omni_neuron.sound.encoding import pcm16, wav_header


@dataclass(frozen=True)
class Deltas:
    """Format of one answer's deltas.

    first: delta before all others. text: returns the delta of a text. last: deltas after all
    others; the finish reason comes with the last one. sound: returns the parts of a chunk's delta
    in JSON; a part may be as long as the chunk and is copied once.
    """

    first: dict[str, Any]
    text: Callable[[str], dict[str, Any]]
    last: Sequence[dict[str, Any]]
    sound: Callable[[AudioChunk], Sequence[bytes]]


WRITTEN = Deltas(
    {"role": "assistant", "content": ""}, lambda text: {"content": text}, [{}], lambda _: ()
)


def spoken(audio_id: str, voice: str, expires_at: int, with_header: bool) -> Deltas:
    """Return the format of a spoken answer. with_header: its sound begins with a WAV header."""

    def sound(chunk: AudioChunk) -> Sequence[bytes]:
        data = pcm16(chunk.samples)
        if with_header and not chunk.first_sample:
            data = wav_header(SAMPLE_RATE) + data
        return b'{"audio":{"data":"', pybase64.b64encode(data), b'"}}'

    return Deltas(
        {"role": "assistant", "content": None, "audio": {"id": audio_id, "voice": voice}},
        lambda text: {"audio": {"transcript": text}},
        [{"audio": {"expires_at": expires_at}}, {}],
        sound,
    )


def _wav_file(chunk: AudioChunk) -> Sequence[bytes]:
    data = pcm16(chunk.samples)
    file = pybase64.b64encode(wav_header(SAMPLE_RATE, len(data)) + data)
    return b'{"content":"', file, b'"}'


# Its clients print the content of every piece with text.
VLLM_OMNI = replace(WRITTEN, last=[{"content": ""}], sound=_wav_file)
"""Format of a spoken answer's deltas for vllm-omni's clients."""
