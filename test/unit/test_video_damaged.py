"""Video files that are cut short, damaged or joined, animations, and what is no video."""

import io
import random
import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from qwen3_omni_neuron.errors import PromptTooLongError, VideoError
from qwen3_omni_neuron.prompt.media import animated_webp
from qwen3_omni_neuron.prompt.media.container import packets
from qwen3_omni_neuron.prompt.media.video import Video, VideoHeader, load_video
from qwen3_omni_neuron.prompt.media.video_times import read_timeline
from testing.made_recordings import FRAGMENTS
from testing.made_videos import SIZE, STEP, frame_numbers, make_video

RATE = 16000
THEORA = Path(__file__).parents[1] / "data" / "repeats.ogv"


def load(data: bytes, rate: int | None = None, **item: Any) -> tuple[Video, list[str]]:
    warnings: list[str] = []
    item = {"type": "video", "video": data, **item}
    video = load_video(item, "here", audio_rate=rate, warn=warnings.append)
    return video, warnings


FILES = {
    "avi": ("avi", "mpeg4", "pcm_s16le", True),
    "avi-mp3": ("avi", "mpeg4", "mp3", True),
    "matroska": ("matroska", "mpeg4", "aac", True),
    "webm": ("webm", "libvpx-vp9", None, True),
    "flv": ("flv", "flv", "mp3", True),
    "mp4": ("mp4", "mpeg4", "aac", True),
    "mpegts": ("mpegts", "mpeg2video", "mp2", False),
}


def made(tmp_path: Path, name: str) -> bytes:
    container, codec, audio, _ = FILES[name]
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    options = {"movflags": "faststart"} if name == "mp4" else {}
    file = tmp_path / "video"
    return make_video(40, container=container, codec=codec, audio=audio, file=file, options=options)


@pytest.mark.parametrize("part", [1.0, 0.85, 0.7, 0.5, 0.4])
@pytest.mark.parametrize("name", FILES)
def test_of_a_file_cut_short_what_is_there_is_used_and_said(
    tmp_path: Path, name: str, part: float
) -> None:
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
        assert video.audio is not None
        assert len(video.audio) / RATE == pytest.approx(min(there_s, 1.05), abs=0.17)
    if part == 1:
        assert warnings == []
        return
    assert warnings[0].startswith("here: the file is cut short: ")
    if FILES[name][3]:
        assert ": of 1.3" in warnings[0]
        assert " s that its header promises " in warnings[0]
        assert warnings[0].endswith(" s are there. They are used.")
    else:
        assert f"packet is not whole. The {there_s:.2f} s that can be decoded" in warnings[0]


def test_where_nothing_of_a_file_is_left_it_is_refused(tmp_path: Path) -> None:
    for name in FILES:
        data = made(tmp_path, name)
        with pytest.raises(VideoError, match=r"^here: \d+ bytes (can't be|has|is)"):
            load(data[:200], RATE)


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "libx264"), ("mp4", "mpeg4"), ("mpegts", "libx264")]
)
def test_of_a_damaged_file_what_can_be_decoded_is_used_and_said(container: str, codec: str) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    data = bytearray(make_video(40, container=container, codec=codec))
    begin, length = len(data) // 3, len(data) // 6
    data[begin : begin + length] = random.Random(1).randbytes(length)
    video, (warning,) = load(bytes(data), fps=30)
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
    assert video.audio is not None
    assert len(video.audio) / RATE == pytest.approx(1.02 - 5 * 1024 / 44100, abs=0.06)
    assert warning.startswith("here (its audio) is damaged: ")
    assert "packets of it can't be decoded. The others are used." in warning


def clip(container: str, codec: str, rate: int, **options: Any) -> bytes:
    return make_video(20, container=container, codec=codec, rate=rate, **options)


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mpegts", "mpeg2video"), ("mpegts", "libx264"), ("mpeg", "mpeg2video")],
)
def test_files_that_are_joined_are_used_one_after_the_other(container: str, codec: str) -> None:
    """At 30 and at 15 frames a second: 0.67 and 1.33 s."""
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    both = clip(container, codec, 30, audio="mp2", audio_s=2 / 3)
    both += clip(container, codec, 15, audio="mp2", audio_s=4 / 3)
    video, (warning,) = load(both, RATE, fps=15)
    assert len(video.frames) / video.fps == pytest.approx(2, abs=0.07)
    seen = frame_numbers(video.frames)
    again = seen.index(0, 1)
    assert again / video.fps == pytest.approx(2 / 3, abs=0.1)
    assert np.abs(np.diff(seen[:again]) - 2).max() <= 1
    assert np.abs(np.diff(seen[again:]) - 1).max() <= 1
    assert video.audio is not None
    assert len(video.audio) / RATE == pytest.approx(2, abs=0.1)
    assert "is joined of 2 files: its timestamps begin anew. Their 2.0" in warning


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        *(("mp4", "mpeg4"), ("mov", "mpeg4"), ("flv", "flv"), ("asf", "mpeg4"), ("3gp", "mpeg4")),
        *(("nut", "mpeg4"), ("wtv", "mpeg4"), ("ivf", "libvpx"), ("swf", "flv"), ("rm", "rv10")),
    ],
)
def test_where_the_first_of_joined_files_is_used_it_is_said(container: str, codec: str) -> None:
    one = clip(container, codec, 20)
    alone, nothing = load(one)
    made, warnings = load(3 * one)
    assert nothing == []
    assert np.array_equal(made.frames, alone.frames)
    assert warnings == [
        f"here: {3 * len(one)} bytes: of the 3 files that it is joined of the first is used, "
        "1.00 s. Send the others one by one."
    ]


@pytest.mark.parametrize(
    ("container", "codec", "said"),
    [
        ("asf", "mpeg4", "its last packet is not whole"),
        ("swf", "flv", "its last packet is not whole"),
        ("ivf", "libvpx", r"of 2.00 s that its header promises \d"),
        ("rm", "rv10", r"of 2.00 s that its header promises \d"),
        ("flv", "flv", r"of 2.00 s that its header promises \d"),
        ("nut", "mpeg4", "its last packet is not whole"),
        ("mpeg", "mpeg2video", "its last packet is not whole"),
        ("yuv4mpegpipe", "wrapped_avframe", "its last packet is not whole"),
    ],
)
def test_a_header_shows_that_a_file_is_cut_short(container: str, codec: str, said: str) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    data = make_video(40, rate=20, container=container, codec=codec)
    assert load(data)[1] == []
    (warning,) = load(data[: len(data) * 3 // 4])[1]
    assert re.match(f"here: the file is cut short: {said}", warning)


def test_a_fragmented_mp4_cut_short_is_said() -> None:
    data = make_video(40, options=FRAGMENTS)
    assert load(data)[1] == []
    (warning,) = load(data[:-150])[1]
    assert warning.startswith("here: the file is cut short: ")


def test_a_video_with_sound_of_8_channels_in_planes() -> None:
    """PyAV reads a ninth plane behind 8, and ends the process."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        video: Any = out.add_stream("mpeg4", rate=25)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        tone: Any = out.add_stream("aac", rate=48000, layout="7.1")
        for index in range(25):
            frame = av.VideoFrame.from_ndarray(np.zeros((*SIZE, 3), np.uint8), format="rgb24")
            frame.pts = index
            out.mux(video.encode(frame))
        out.mux(video.encode())
        wave = np.sin(2 * np.pi * 440 * np.arange(48000) / 48000) / 4
        samples = np.repeat(wave, 8).astype(np.float32)[None]
        whole = av.AudioFrame.from_ndarray(samples, format="flt", layout="7.1")
        whole.sample_rate, whole.pts = 48000, 0
        for part in av.AudioResampler(format="fltp", frame_size=1024).resample(whole):
            out.mux(tone.encode(part))
        out.mux(tone.encode())
    made, warnings = load(file.getvalue(), RATE)
    assert warnings == []
    assert made.audio is not None
    spectrum = np.abs(np.fft.rfft(made.audio))
    assert np.argmax(spectrum) * RATE / len(made.audio) == pytest.approx(440, abs=1)


def test_a_file_whose_frames_change_their_size_is_used_and_said() -> None:
    small = np.full((24, 32, 3), 120, np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as out:
        stream: Any = out.add_stream("mpeg2video", rate=30)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for index in range(20):
            frame = av.VideoFrame.from_ndarray(small, format="rgb24")
            frame.pts = index
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


@pytest.mark.parametrize("wanted", ["packets", "timeline"])
def test_pyavs_index_error_at_the_end_of_a_file_is_no_error(wanted: str) -> None:
    """A stream has begun that the file's beginning doesn't name."""
    with av.open(io.BytesIO(make_video(20, container="mpegts", codec="mpeg2video"))) as opened:

        def demux(*_: Any) -> Iterator[Any]:
            yield from opened.demux()
            raise IndexError("list index out of range")

        container: Any = SimpleNamespace(demux=demux, format=opened.format)
        if wanted == "packets":
            assert sum(packet.size > 0 for packet in packets(container, None)) == 20
        else:
            timeline = read_timeline(container, opened.streams.video[0], 30.0)
            assert (len(timeline.ticks), timeline.broken) == (20, False)


def test_sound_that_changes_its_rate_is_resampled_and_said() -> None:
    """Half a second of 440 Hz at 44.1 kHz, and another one at 22.05 kHz."""
    files = []
    for rate in (44100, 22050):
        file = io.BytesIO()
        with av.open(file, "w", format="mpegts") as out:
            video: Any = out.add_stream("mpeg2video", rate=25)
            video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
            tone: Any = out.add_stream("mp2", rate=rate)
            for index in range(12):
                frame = av.VideoFrame.from_ndarray(np.zeros((*SIZE, 3), np.uint8), format="rgb24")
                frame.pts = index
                out.mux(video.encode(frame))
            out.mux(video.encode())
            for start in range(0, rate // 2, 1152):
                wave = np.sin(2 * np.pi * 440 * np.arange(start, start + 1152) / rate) / 2
                both = np.stack([wave, wave]).astype(np.float32)
                part = av.AudioFrame.from_ndarray(both, format="fltp", layout="stereo")
                part.sample_rate, part.pts = rate, start
                out.mux(tone.encode(part))
            out.mux(tone.encode())
        files.append(file.getvalue())
    made, warnings = load(b"".join(files), RATE)
    assert made.audio is not None
    assert len(made.audio) / RATE == pytest.approx(1.05, abs=0.1)
    for begin_s in (0.1, 0.7):
        begin = round(begin_s * RATE)
        spectrum = np.abs(np.fft.rfft(made.audio[begin : begin + RATE // 4]))
        assert np.argmax(spectrum) * 4 == 440
    (said,) = [warning for warning in warnings if "its audio" in warning]
    assert "changes from 44100 Hz and 2 channels to 22050 Hz" in said
    assert said.endswith("All of it is used, at 44100 Hz.")


def test_an_empty_packet_shows_the_frame_before_it_again() -> None:
    """Ten different frames of Theora, and ten empty packets among them.

    As ffmpeg decodes them (framecrc): new frames at 0, 3, 5, 6, 10, 11, 12, 14, 16 and 17 tenths.
    Many times, because threads that decode frames of Theora side by side give wrong ones at times.
    """
    greys = [0, 2, 6, 11, 15, 20, 25, 30, 34, 39]
    times = [0, 3, 5, 6, 10, 11, 12, 14, 16, 17, 20]
    expected = [
        grey for grey, (a, b) in zip(greys, pairwise(times), strict=True) for _ in range(a, b)
    ]
    for _ in range(30):
        video, warnings = load(THEORA.read_bytes(), fps=10)
        assert frame_numbers(video.frames) == expected
        assert video.fps == 10
        assert warnings == []
    cut, (warning,) = load(THEORA.read_bytes()[:-100], fps=10)
    assert len(cut.frames) < 20
    assert warning.startswith("here: the file is cut short: its last packet is not whole. The 1.")


DURATIONS_MS = [100] * 10 + [300] * 10


def animation(kind: str, durations: Any = DURATIONS_MS, n: int = 20) -> bytes:
    frames = [Image.new("RGB", SIZE[::-1], (i * STEP,) * 3) for i in range(n)]
    file = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(
        file, kind, save_all=True, append_images=frames[1:], duration=durations, **options
    )
    return file.getvalue()


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "PNG", "AVIF"])
def test_an_animation_is_a_video(kind: str) -> None:
    data = animation(kind)
    video, warnings = load(data, RATE)
    assert warnings == []
    assert video.audio is None
    assert video.fps == pytest.approx(2)  # 8 frames of 4 s
    starts = np.cumsum([0, *DURATIONS_MS[:-1]])
    shown = [int(np.searchsorted(starts, 500 * k, side="right")) - 1 for k in range(8)]
    assert frame_numbers(video.frames) == shown == [0, 5, 10, 11, 13, 15, 16, 18]
    part, _ = load(data, RATE, video_start=1, video_end=2.5, nframes=4)
    assert frame_numbers(part.frames) == [10, 11, 12, 13]


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "PNG"])
def test_an_animation_cut_short_is_used_and_said(kind: str) -> None:
    data = animation(kind, 100)
    video, (warning,) = load(data[: len(data) // 2], fps=10)
    seen = frame_numbers(video.frames)
    assert seen[:-1] == list(range(len(seen) - 1))  # the last one may be torn
    assert 6 <= len(seen) <= 10
    assert "is cut short" in warning


def test_an_animation_is_checked_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size and length are in the headers of its chunks."""
    told = []

    def refuse(header: VideoHeader) -> None:
        told.append(header)
        raise PromptTooLongError("too long")

    data = animation("WEBP")
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it is opened"))
    with pytest.raises(PromptTooLongError):
        load_video({"video": data}, "here", audio_rate=None, check=refuse)
    assert told == [VideoHeader(8, *SIZE, 4.0, 0.0)]


def test_frames_of_an_animation_without_a_duration_last_as_in_browsers() -> None:
    video, _ = load(animation("WEBP", 0, 4))
    assert len(video.frames) / video.fps == pytest.approx(0.4)


def test_a_broken_animation_is_refused() -> None:
    data = bytearray(animation("WEBP"))
    data[200:400] = bytes(200)
    for content in (
        bytes(data),
        b"RIFF\0\0\0\0WEBPVP8X",
        b"RIFF\0\0\0\0WEBPANMF\x40\0\0\0" + bytes(99),
    ):
        with pytest.raises(VideoError, match=r"^here: \d+ bytes is a"):
            load(content)


def test_frames_of_a_webp_without_a_canvas_are_no_animation() -> None:
    def refuse(header: VideoHeader) -> None:
        pytest.fail(f"it is read as {header}")

    for content in (
        animation("WEBP").replace(b"VP8X", b"VP8Y", 1),
        b"RIFF\x80\0\0\0WEBPANMF\x40\0\0\0" + bytes(0x40) + b"ANMF\x20\0\0\0" + bytes(0x20),
    ):
        with pytest.raises(VideoError, match="WebP"):
            load_video({"video": content}, "here", audio_rate=None, check=refuse)


@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF", "AVIF", "ICO", "JPEG2000"]
)
def test_a_picture_is_sent_where_it_belongs(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 48)).save(file, kind)
    usual = {"WEBP": "WebP", "JPEG2000": "JPEG 2000"}.get(kind, kind)
    said = rf'is a picture \({usual}\), not a video. Send it as an item of type "image" \(image_url'
    with pytest.raises(VideoError, match=said):
        load(file.getvalue())


def test_a_document_is_named() -> None:
    with pytest.raises(VideoError, match="is PDF, not a video"):
        load(b"%PDF-1.7\n" + bytes(99))


def test_a_file_without_video_says_what_is_in_it() -> None:
    with pytest.raises(VideoError, match=r"has no video stream, only subtitle\."):
        load(b"1\n00:00:01,000 --> 00:00:02,000\nWords\n\n" * 3)
    header = struct.pack(">I4s4x8xIIII68xI", 108, b"mvhd", 1000, 1000, 0x10000, 0x1000000, 1)
    empty = struct.pack(">I4s4sI", 16, b"ftyp", b"isom", 0) + struct.pack(">I4s", 116, b"moov")
    with pytest.raises(VideoError, match=r"\(mov.*\) has no streams: it is broken, or cut short"):
        load(empty + header)


@pytest.mark.parametrize("container", ["matroska", "nut", "mp4"])
def test_frames_in_another_order_are_not_of_a_joined_file(container: str) -> None:
    """FFmpeg knows no decoding time of the first packets, whose frames are shown later."""
    data = make_video(25, rate=25, container=container, codec="libx264", b_frames=3)
    video, warnings = load(data)
    assert warnings == []
    assert len(video.frames) / video.fps == pytest.approx(1.0)


def test_joined_files_with_frames_in_another_order_follow_one_another() -> None:
    data = make_video(25, rate=25, container="matroska", codec="libx264", b_frames=3)
    video, (warning,) = load(2 * data, fps=25)
    assert len(video.frames) / video.fps == pytest.approx(2.0, abs=0.05)
    assert "is joined of 2 files" in warning
    expected = 2 * list(range(25))
    assert np.abs(np.array(frame_numbers(video.frames)) - expected[: len(video.frames)]).max() <= 1


@pytest.mark.parametrize(
    ("container", "codec"),
    [("avi", "mpeg4"), ("ivf", "libvpx"), ("rm", "rv10"), ("swf", "flv")],
)
def test_a_whole_file_written_to_a_pipe_is_not_said_to_be_cut_short(
    container: str, codec: str
) -> None:
    """FFmpeg puts a length into its header that is none."""
    _, warnings = load(make_video(25, rate=25, container=container, codec=codec, piped=True))
    assert warnings == []


def test_a_webp_of_too_many_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(animated_webp, "MOST_CHUNKS", 1000)
    data = animation("WEBP") + b"ANMF\0\0\0\0" * 1000
    with pytest.raises(VideoError, match=f"here: {len(data)} bytes are a WebP of more than 1000 "):
        load(data)
