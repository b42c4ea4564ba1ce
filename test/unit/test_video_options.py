"""Fields of a video item that choose frames: number, rate, and part of the file."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron.errors import VideoError
from qwen3_omni_neuron.prompt.media.video import Video, VideoHeader, load_video
from testing.made_videos import frame_numbers, make_video

RATE = 16000
VIDEO = make_video(40)  # 1.33 s at 30 frames a second
TIMES_MS = [0, 10, 20, 30, 40, 50, 1000, 1100, 3000, 3900]
VARIABLE = make_video(10, times_ms=TIMES_MS, container="matroska")


def load(
    video: Any = VIDEO, warnings: list[str] | None = None, rate: int | None = None, **item: Any
) -> Video:
    warn = pytest.fail if warnings is None else warnings.append
    return load_video({"type": "video", "video": video, **item}, "here", audio_rate=rate, warn=warn)


def smart_nframes(total: int, video_fps: float, **given: Any) -> int:
    """Number of frames as qwen-omni-utils 0.0.9 counts them, without its refusals."""
    if "nframes" in given:
        return round(given["nframes"] / 2) * 2
    least = math.ceil(given.get("min_frames", 4) / 2) * 2
    most = given.get("max_frames", min(768, total)) // 2 * 2
    wanted = min(max(total / video_fps * given.get("fps", 2.0), least), most, total)
    return math.floor(wanted / 2) * 2


def test_frames_are_as_many_as_qwen_omni_utils_takes() -> None:
    """And they are spread as transformers' processor spreads them, floor(k * total / n).

    qwen-omni-utils spreads them from the first frame to the last, round(k * (total - 1) / (n - 1)),
    which is not at the times that the positions of the prompt say.
    """
    for given in (
        *({"fps": fps} for fps in (0.5, 1, 3, 7.5, 10.4, 29, 30, 100)),
        *({"min_frames": least} for least in (2, 3, 4, 5, 6, 39, 40, 41, 200)),
        *({"max_frames": most, "fps": 30} for most in (2, 3, 4, 9, 39, 40, 1000)),
        {"min_frames": 5, "max_frames": 8, "fps": 1},
        *({"nframes": n} for n in (2, 3, 4, 5, 7, 8, 11, 13, 39, 40)),
    ):
        video = load(**given)
        n = smart_nframes(40, 30, **given)
        assert frame_numbers(video.frames) == [k * 40 // n for k in range(n)]
        assert video.fps == pytest.approx(n / (40 / 30))  # its sample_fps


@pytest.mark.parametrize(
    ("start", "end"),
    [(None, 1), (0, 0.5), (0.1, 1.1), (0.5, None), (0.7, 0.8), (1, 99), (0.31, 0.39), (1.3, None)],
)
@pytest.mark.parametrize("container", ["mp4", "matroska", "avi", "mpegts"])
def test_of_a_part_the_frames_are_seen_that_begin_in_it(container, start, end) -> None:
    """Both ends belong to the part, as in qwen-vl-utils."""
    codec = "mpeg2video" if container == "mpegts" else "mpeg4"
    data = make_video(40, container=container, codec=codec, b_frames=2)
    given = {"video_start": start, "video_end": end}
    video = load(data, nframes=2, **given) if start == 0.7 else load(data, fps=30, **given)
    first = math.ceil(Fraction(str(start or 0)) * 30)
    last = 39 if end is None else min(39, math.floor(Fraction(str(end)) * 30))
    total = last - first + 1
    n = 2 if start == 0.7 else max(1, total // 2 * 2)
    assert frame_numbers(video.frames) == [first + k * total // n for k in range(n)]
    assert video.fps == pytest.approx(n / total * 30)


def test_of_a_part_at_a_variable_rate_the_frame_on_the_screen_is_seen() -> None:
    for start, end, shown in (
        (0.5, 1.05, [5, 5]),  # the frame on the screen at 0.5 s has begun before
        (0.02, 1.1, [2, 5, 5, 5]),
        (1.05, 3.95, [6, 7, 7, 8]),
        (2.0, None, [7, 7]),
        (0.055, 0.5, [5]),
    ):
        video = load(VARIABLE, fps=0.1, video_start=start, video_end=end)
        assert frame_numbers(video.frames) == shown
        length = min(end or 9, 3.933) - start
        assert video.fps == pytest.approx(len(shown) / length, abs=1e-3)


def test_a_part_is_decoded_from_the_keyframe_before_it_on(monkeypatch) -> None:
    from qwen3_omni_neuron.prompt.media import video_file

    data = make_video(40)
    decoded = []
    frames = video_file._decoded

    def counted(*given: Any) -> Any:
        for frame in frames(*given):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(video_file, "_decoded", counted)
    assert frame_numbers(load(data, video_start=1.0, nframes=4).frames) == [30, 32, 35, 37]
    whole = len(decoded)
    assert whole <= 28  # keyframes of mpeg4 are 12 frames apart
    decoded.clear()
    load(data)
    assert len(decoded) > whole


@pytest.mark.parametrize(
    ("start", "end", "seconds"),
    [(0.5, None, 0.5), (0.2, 0.6, 13 / 30), (None, 0.5, 16 / 30), (0.5, 99, 0.5)],
)
def test_the_sound_is_that_of_the_part(start, end, seconds) -> None:
    data = make_video(30, container="matroska", audio="pcm_s16le")
    whole = load(data, rate=RATE).audio
    audio = load(data, rate=RATE, video_start=start, video_end=end).audio
    assert len(audio) / RATE == pytest.approx(seconds, abs=0.03)
    begin = round((start or 0) * RATE)
    there = whole[begin : begin + len(audio)]
    middle = slice(500, min(len(audio), len(there)) - 500)  # the resampler's ends differ
    assert np.abs(audio[middle] - there[middle]).max() < 2e-3


def test_a_part_after_the_end_of_the_sound_has_none_and_says_so() -> None:
    data = make_video(40, container="matroska", audio="pcm_s16le", audio_s=0.5)
    warnings: list[str] = []
    assert load(data, warnings, RATE, video_start=0.8).audio is None
    assert warnings == ["here (its audio) ends before 0.80 s. The part of the video has no audio."]


def test_the_header_that_is_checked_is_the_parts() -> None:
    told: list[VideoHeader] = []
    item = {"video": VIDEO, "video_start": 0.5, "video_end": 1.0, "fps": 4}
    load_video(item, "here", audio_rate=RATE, check=told.append)
    assert told == [VideoHeader(4, 48, 64, pytest.approx(16 / 30), 0.0)]


def test_what_the_file_does_not_have_is_refused() -> None:
    """A value that is wrong for any file is refused before: see prompt.media.fields."""
    for item, said in (
        ({"nframes": 42}, r"nframes 42, but only 40 frames\. Give fewer, or fps"),
        ({"nframes": 20, "video_end": 0.5}, "nframes 20, but only 16 frames"),
        ({"min_frames": 1000}, "min_frames 1000, and max_frames is 768"),
        ({"video_start": 1.5}, "video_start 1.5, but the video lasts 1.33 s"),
    ):
        with pytest.raises(VideoError, match=f"^here.*{said}"):
            load(**item)
