"""Recordings for tests: a tone in a container of browsers and phones, and Matroska made by hand."""

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

FRAGMENTS = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
_SECONDS_A_FRAME = 0.5


class Unseekable:
    """Target that can only be written, as a socket: a header can't be completed at the end."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data: bytes) -> int:
        self.content += data
        return len(data)


def tone(rate: int, seconds: float) -> np.ndarray:
    """Return float32 [2, samples]: 440 Hz on the left, and a third of it on the right."""
    wave = np.sin(2 * np.pi * 440 * np.arange(round(rate * seconds)) / rate) / 2
    return np.stack([wave, wave / 3]).astype(np.float32)


def make_recording(
    form: str,
    codec: str,
    *,
    rate: int = 48000,
    channels: int = 1,
    seconds: float = 1.0,
    options: dict[str, str] | None = None,
    streamed: bool = False,
) -> bytes:
    """Return a tone in a container. form: FFmpeg's name of it. streamed: written without seeking.

    A streamed WebM says no length, as those that browsers record.
    """
    import av

    target: Any = Unseekable() if streamed else io.BytesIO()
    layout = "mono" if channels == 1 else "stereo"
    samples = tone(rate, seconds)[:channels]
    with av.open(target, "w", format=form, options=options or {}) as out:
        stream: Any = out.add_stream(codec, rate=rate, layout=layout)
        stream.codec_context.options = {"strict": "-2"}  # FFmpeg's encoder of Vorbis
        step = round(_SECONDS_A_FRAME * rate)
        for start in range(0, samples.shape[1], step):
            part = np.ascontiguousarray(samples[:, start : start + step])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, start
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return bytes(target.content) if streamed else target.getvalue()


def make_matroska(
    packets: Sequence[bytes],
    *,
    codec: str = "A_PCM/INT/LIT",
    rate: int = 16000,
    packed: bool = False,
    block_ticks: int | None = None,
    seconds: float | None = None,
) -> bytes:
    """Return packets of mono sound in a Matroska file, one every 20 ms by its timestamps.

    packed: each is compressed by zlib. block_ticks: duration that each block says, in ms.
    seconds: length that the header says.
    """
    track = [
        _element("D7", b"\1"),
        _element("73C5", b"\1"),
        _element("83", b"\2"),  # audio
        _element("86", codec.encode()),
        _element(
            "E1",
            _element("B5", struct.pack(">d", rate)),
            _element("9F", b"\1"),
            _element("6264", b"\x10"),
        ),
    ]
    if packed:
        algorithm = _element("4254", b"\0")
        track.append(_element("6D80", _element("6240", _element("5034", algorithm))))
    data = {packet: zlib.compress(packet) if packed else packet for packet in set(packets)}
    clusters = []
    for index, packet in enumerate(packets):
        block = [_element("A1", b"\x81\0\0\0" + data[packet])]
        if block_ticks is not None:
            block.append(_element("9B", block_ticks.to_bytes(4, "big")))
        time = _element("E7", (20 * index).to_bytes(8, "big"))
        clusters.append(_element("1F43B675", time, _element("A0", *block)))
    length = [] if seconds is None else [_element("4489", struct.pack(">d", 1000 * seconds))]
    info = _element("1549A966", _element("2AD7B1", (1_000_000).to_bytes(4, "big")), *length)
    tracks = _element("1654AE6B", _element("AE", *track))
    head = _element("1A45DFA3", _element("4282", b"matroska"))
    return head + _element("18538067", info, tracks, *clusters)


def _element(name: str, *content: bytes) -> bytes:
    """Return an EBML element. name: its id in hexadecimal."""
    data = b"".join(content)
    return bytes.fromhex(name) + b"\1" + len(data).to_bytes(7, "big") + data
