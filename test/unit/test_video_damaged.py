"""Video files that are cut short, damaged or joined, and what is no video."""

import io
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from qwen3_omni_neuron.errors import VideoError
from qwen3_omni_neuron.prompt.media.video import Video, load_video
from testing.made_videos import SIZE, STEP, frame_numbers, make_video

RATE = 16000


def load(data: bytes, rate: int | None = None, **item: Any) -> tuple[Video, list[str]]:
    warnings: list[str] = []
    item = {"type": "video", "video": data, **item}
    video = load_video(item, "here", audio_rate=rate, warn=warnings.append)
    return video, warnings


FILES = {
    "avi": ("avi", "mpeg4", "pcm_s16le"),
    "avi-mp3": ("avi", "mpeg4", "mp3"),
    "matroska": ("matroska", "mpeg4", "aac"),
    "webm": ("webm", "libvpx-vp9", None),
    "mp4": ("mp4", "mpeg4", "aac"),
    "mpegts": ("mpegts", "mpeg2video", "mp2"),
}


def made(tmp_path: Path, name: str) -> bytes:
    container, codec, audio = FILES[name]
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    options = {"movflags": "faststart"} if name == "mp4" else {}
    file = tmp_path / "video"
    return make_video(40, container=container, codec=codec, audio=audio, file=file, options=options)


@pytest.mark.parametrize("part", [1.0, 0.7, 0.4])
@pytest.mark.parametrize("name", FILES)
def test_of_a_file_cut_short_what_is_there_is_used_and_said(tmp_path, name, part) -> None:
    """Frames are the packets that PyAV finds; the sound is as long as they are."""
    data = made(tmp_path, name)
    data = data[: int(len(data) * part)]
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        ends = [packet.pts for packet in container.demux(stream) if packet.pts is not None]
        there_s = float((max(ends) - min(ends)) * stream.time_base) + 1 / 30
    video, warnings = load(data, RATE, fps=30)
    assert len(video.frames) / video.fps == pytest.approx(there_s, abs=0.01)
    seen = frame_numbers(video.frames)
    assert seen == sorted(seen)
    assert seen[-1] <= round(30 * there_s)
    assert seen[-1] >= round(30 * there_s) - 4
    if FILES[name][2] is not None:
        assert len(video.audio) / RATE == pytest.approx(min(there_s, 1.05), abs=0.17)
    if part == 1:
        assert warnings == []
        return
    (warning, *_) = warnings
    assert re.match(
        rf"here: {len(data)} bytes is incomplete: .*Its {there_s:.2f} s are used", warning
    )


def test_where_nothing_of_a_file_is_left_it_is_refused(tmp_path) -> None:
    for name in FILES:
        data = made(tmp_path, name)
        with pytest.raises(VideoError, match=r"^here: \d+ bytes (can't be|has|is)"):
            load(data[:200], RATE)


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "libx264"), ("mp4", "mpeg4"), ("mpegts", "libx264")]
)
def test_of_a_damaged_file_what_can_be_decoded_is_used_and_said(container, codec) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    data = bytearray(make_video(40, container=container, codec=codec))
    begin, length = len(data) // 3, len(data) // 6
    data[begin : begin + length] = random.Random(1).randbytes(length)
    video, (*_, warning) = load(bytes(data), fps=30)
    seen = frame_numbers(video.frames)
    assert seen[:5] == [0, 1, 2, 3, 4]
    assert len(set(seen)) > 12
    stand_in = sum(a == b for a, b in pairwise(seen))
    assert f"damaged: parts of its video can't be decoded. Of the {len(seen)} frames" in warning
    said = int(warning.split(" used, ")[1].split()[0])
    assert 0 < said <= stand_in + 3


def test_damaged_sound_is_used_and_said() -> None:
    data = bytearray(make_video(40, container="mp4", audio="aac"))
    with av.open(io.BytesIO(bytes(data))) as container:
        packets = [p for p in container.demux(container.streams.audio[0]) if p.size]
        for packet in packets[10:15]:
            data[packet.pos : packet.pos + packet.size] = b"\xff" * packet.size
    video, (warning,) = load(bytes(data), RATE)
    assert len(video.audio) / RATE == pytest.approx(1.02 - 5 * 1024 / 44100, abs=0.06)
    assert warning.startswith("here (its audio) is damaged: ")
    assert re.search(
        r"packets of it can't be decoded; 0\.1\d s are missing at 0\.2\d s\. ", warning
    )


def test_of_joined_files_the_first_is_used_and_it_is_said() -> None:
    for container, codec in (("mp4", "mpeg4"), ("mov", "mpeg4"), ("matroska", "mpeg4")):
        one = make_video(20, container=container, codec=codec, rate=20)
        alone, nothing = load(one)
        made, (warning, *_) = load(3 * one)
        assert nothing == []
        assert np.array_equal(made.frames, alone.frames)
        assert re.search(r"is incomplete: .* Its 1\.00 s are used\.", warning)


def test_a_file_whose_frames_change_their_size_is_used_and_said() -> None:
    small = np.full((24, 32, 3), 120, np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as out:
        stream: Any = out.add_stream("mpeg2video", rate=30)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for index in range(20):
            frame = av.VideoFrame.from_ndarray(small, format="rgb24")
            frame.pts = 20 + index
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    both = make_video(20, container="mpegts", codec="mpeg2video") + file.getvalue()
    video, warnings = load(both)
    assert video.frames.shape[1:3] == SIZE
    assert frame_numbers(video.frames)[-1] == 120 // STEP
    assert warnings[-1] == (
        f"here: {len(both)} bytes changes from 64 x 48 to 32 x 24 pixels. All frames are scaled "
        "to the first size."
    )


@pytest.mark.parametrize("container", ["matroska", "mp4"])
def test_frames_in_another_order_are_not_of_a_joined_file(container) -> None:
    """FFmpeg knows no decoding time of the first packets, whose frames are shown later."""
    data = make_video(25, rate=25, container=container, codec="libx264", b_frames=3)
    video, warnings = load(data)
    assert warnings == []
    assert len(video.frames) / video.fps == pytest.approx(1.0)


def test_an_avi_written_to_a_pipe_is_not_said_to_be_cut_short() -> None:
    """FFmpeg puts a length into its header that is none."""
    assert load(make_video(25, rate=25, container="avi", piped=True))[1] == []
