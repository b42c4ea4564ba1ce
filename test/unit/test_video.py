"""Videos in every form a caller may have them: which frames are seen, when, and with what sound."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from qwen3_omni_neuron.errors import AudioError, PromptTooLongError, VideoError
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.video import Video, VideoHeader, load_video
from testing.made_videos import SIZE, STEP, frame_numbers, make_video, with_edits

RATE = 16000


def load(video: Any, *, audio_rate: int | None = None, **item: Any) -> Video:
    loaded = load_video({"type": "video", "video": video, **item}, "here", audio_rate=audio_rate)
    assert loaded.frames.dtype == np.uint8
    assert loaded.frames.ndim == 4
    assert loaded.frames.shape[3] == 3
    return loaded


def reference_indices(total: int, file_fps: float, fps: float, most: int = 768) -> list[int]:
    """transformers Qwen2VLVideoProcessor.sample_frames, which can't be imported without
    torchvision.
    """
    most = math.floor(min(most, total) / 2) * 2
    n = math.floor(min(max(total / file_fps * fps, 4), most, total) / 2) * 2
    return torch.arange(0, total, total / n).int().tolist()


@pytest.mark.parametrize(
    ("container", "codec", "b_frames"),
    [
        ("mp4", "mpeg4", 0),
        ("mp4", "mpeg4", 2),
        ("matroska", "mpeg4", 2),
        ("avi", "mpeg4", 2),
        ("avi", "libx264", 2),  # with timestamps in another order than its frames
        ("mpegts", "mpeg2video", 2),
    ],
)
@pytest.mark.parametrize("fps", [2, 7.5, 30, 100])
def test_frames_are_those_that_the_reference_samples(container, codec, b_frames, fps) -> None:
    import av

    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    video = load(make_video(40, container=container, codec=codec, b_frames=b_frames), fps=fps)
    expected = reference_indices(40, 30, fps)
    assert frame_numbers(video.frames) == expected
    assert video.fps == pytest.approx(len(expected) / (40 / 30))


@pytest.mark.parametrize("rate", [7, 24, 25, 60])
@pytest.mark.parametrize("container", ["mp4", "matroska"])  # matroska counts whole milliseconds
def test_any_rate_of_a_file_is_seen_at_2_frames_a_second(rate, container) -> None:
    n = 40 if rate < 60 else 39
    video = load(make_video(n, rate=rate, container=container))
    assert frame_numbers(video.frames) == reference_indices(n, rate, 2)
    assert video.fps == pytest.approx(len(video.frames) * rate / n)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_short_videos_have_all_their_frames_but_an_odd_one(n) -> None:
    video = load(make_video(n))
    assert len(video.frames) == max(1, n // 2 * 2)
    assert len(video.frames) / video.fps == pytest.approx(n / 30, abs=0.002)


@pytest.mark.parametrize("container", ["matroska", "mp4"])
def test_of_a_variable_rate_the_frame_on_the_screen_is_seen(container) -> None:
    # Ten frames in a hurry, then long stills.
    times = [0, 10, 20, 30, 40, 50, 1000, 1100, 3000, 3900]
    video = load(make_video(10, times_ms=times, container=container))
    seconds = len(video.frames) / video.fps
    assert seconds == pytest.approx(3.9, abs=0.12)  # and however long the last one is shown
    assert len(video.frames) == 6
    shown = [
        max(i for i, start in enumerate(times) if start <= 1000 * k / video.fps)
        for k in range(len(video.frames))
    ]
    assert frame_numbers(video.frames) == shown
    assert shown == [0, 5, 7, 7, 7, 8]


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("upside_down", [False, True])
def test_frames_are_shown_as_the_display_matrix_says(degrees, mirrored, upside_down) -> None:
    from av.video.stream import VideoStream

    if not hasattr(VideoStream, "set_display_matrix"):
        pytest.skip("this PyAV can't write a display matrix")
    plain = load(make_video(4)).frames
    shown = load(make_video(4, turned=(degrees, mirrored, upside_down))).frames
    expected = np.rot90(plain, degrees // 90, axes=(1, 2))
    expected = expected[:, :, ::-1] if mirrored else expected
    assert np.array_equal(shown, expected[:, ::-1] if upside_down else expected)
    assert (plain[:, 4, 4] > 200).all()  # the corner that says which way is up
    assert (plain[:, -4, 4] < 100).all()


EDITS: dict[str, tuple[list[tuple[float, float | None]], list[int]]] = {
    "start": ([(2.4, 1.6)], [*range(16, 40)]),
    "end": ([(2.0, 0.0)], [*range(20)]),
    "both": ([(2.0, 1.0)], [*range(10, 30)]),
    "between frames": ([(2.0, 1.05)], [*range(11, 31)]),
    "delay": ([(0.5, None), (2.0, 1.0)], [*range(10, 30)]),
    "two parts": ([(1.0, 0.5), (1.0, 3.0)], [*range(5, 15), *range(30, 40)]),
    "another order": ([(1.0, 3.0), (1.0, 0.0)], [*range(30, 40), *range(10)]),
}


@pytest.mark.parametrize(("codec", "b_frames"), [("mpeg4", 0), ("libx264", 2)])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_list_says_what_is_shown(name, codec, b_frames) -> None:
    import av

    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    parts, numbers = EDITS[name]
    video = make_video(40, rate=10, codec=codec, b_frames=b_frames, audio="aac", audio_s=4.0)
    item, said = {"video": with_edits(video, parts), "fps": 10.0}, list[str]()
    shown = load_video(item, "here", audio_rate=RATE, warn=said.append)
    heard = load_waveform({"audio": item["video"]}, RATE, "here", warn=said.append)
    assert said == []
    for sound in (shown.audio, heard):
        assert len(sound) / RATE == pytest.approx(len(numbers) / 10, abs=0.06)
    if b_frames and len(parts) > 1:
        # FFmpeg moves the second part by a frame: one is missing or shown twice.
        assert set(numbers) - set(frame_numbers(shown.frames)) <= {14, 39}
        return
    assert frame_numbers(shown.frames) == numbers
    assert shown.fps == pytest.approx(10.0)
    part = load(item["video"], video_start=0.4, video_end=0.85, fps=10.0).frames
    assert frame_numbers(part) == numbers[4:8]


def test_an_edit_list_may_end_in_a_long_still() -> None:
    times = [0, 10, 20, 30, 40, 50, 1000, 1100, 3000, 3900]
    video = load(with_edits(make_video(10, times_ms=times), [(2.0, 0.0)]))
    assert frame_numbers(video.frames) == [0, 5, 6, 7]
    assert video.fps == 2.0


def tone_of(audio: np.ndarray) -> float:
    return float(np.argmax(np.abs(np.fft.rfft(audio))) * RATE / len(audio))


@pytest.mark.parametrize(
    ("container", "codec", "off"),
    [("mp4", "aac", 0.05), ("matroska", "pcm_s16le", 0.005), ("avi", "pcm_s16le", 0.005)],
)
def test_sound_is_mono_at_the_rate_that_was_asked_for(container, codec, off) -> None:
    audio = load(make_video(container=container, audio=codec), audio_rate=RATE).audio
    assert audio.dtype == np.float32
    assert len(audio) == pytest.approx(RATE, rel=0.05)
    assert tone_of(audio) == pytest.approx(440, abs=2)
    assert np.abs(audio[2000:14000]).max() == pytest.approx(0.5, abs=off)  # one side is silent
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(2000, 14000) / RATE)
    assert np.abs(audio[2000:14000] - wave).max() < 2 * off  # neither early nor late


def test_sound_that_begins_after_the_picture_stays_after_it() -> None:
    data = make_video(container="matroska", audio="pcm_s16le", audio_late_s=0.5)
    audio = load(data, audio_rate=RATE).audio
    assert np.abs(audio[:7900]).max() < 1e-3
    assert np.abs(audio[8100:9000]).max() == pytest.approx(0.5, abs=0.01)


def test_sound_before_the_picture_is_cut() -> None:
    times = [500 + 33 * i for i in range(30)]
    data = make_video(times_ms=times, container="matroska", audio="pcm_s16le", audio_s=2)
    assert len(load(data, audio_rate=RATE).audio) == pytest.approx(1.5 * RATE, rel=0.03)


def test_sound_is_left_out_where_it_is_not_wanted_or_not_there() -> None:
    assert load(make_video(audio="aac")).audio is None
    assert load(make_video(), audio_rate=RATE).audio is None


def test_sound_that_is_too_short_is_said() -> None:
    data = make_video(container="matroska", audio="pcm_s16le", audio_s=0.01)
    with pytest.raises(AudioError, match=r"^here \(its audio\) lasts 0.0"):
        load(data, audio_rate=RATE)


def grey_frames(n: int = 5) -> np.ndarray:
    return np.stack([np.full((*SIZE, 3), STEP * i, np.uint8) for i in range(n)])


def test_frames_are_the_same_in_every_form(tmp_path) -> None:
    frames = grey_frames()
    paths = []
    for index, frame in enumerate(frames):
        paths.append(tmp_path / f"{index}.png")
        Image.fromarray(frame).save(paths[-1])
    for video in (
        frames,
        frames / 255,
        frames.transpose(0, 3, 1, 2),
        torch.from_numpy(frames),
        list(frames),
        tuple(frames),
        [Image.fromarray(frame) for frame in frames],
        paths,
        [str(path) for path in paths],
        [torch.from_numpy(frame).permute(2, 0, 1) for frame in frames],
    ):
        loaded = load(video, fps=3)
        assert np.array_equal(loaded.frames, frames)
        assert loaded.fps == 3.0
        assert loaded.audio is None


def test_the_items_own_sound_is_what_is_heard() -> None:
    tone = np.sin(2 * np.pi * 1000 * np.arange(8000) / 8000).astype(np.float32)
    wav = io.BytesIO()
    soundfile.write(wav, tone, 8000, format="WAV")
    for video, item in (
        (grey_frames(), {"audio": tone, "sampling_rate": 8000, "fps": 5}),
        (grey_frames(), {"audio": wav.getvalue(), "fps": 5}),
        (make_video(audio="aac"), {"audio": wav.getvalue()}),
    ):
        audio = load(video, audio_rate=RATE, **item).audio
        assert audio is not None
        assert tone_of(audio) == pytest.approx(1000, abs=2)
        assert load(video, **item).audio is None
    too_short = make_video(container="matroska", audio="pcm_s16le", audio_s=0.01)
    assert load(too_short, audio=wav.getvalue(), audio_rate=RATE).audio is not None
    with pytest.raises(AudioError, match=r"^here"):
        load(grey_frames(), fps=5, audio=b"no sound", audio_rate=RATE)


VIDEO = make_video(audio="aac")


def test_what_cannot_be_seen_is_refused() -> None:
    for video, item, said in (
        (None, {}, 'no "video"'),
        ("/nowhere/x.mp4", {}, "does not exist"),
        (b"", {}, "0 bytes"),
        (b"not a video at all" * 9, {}, "162 bytes is of an unknown format"),
        (VIDEO[: len(VIDEO) // 2], {}, "damaged or truncated"),
        (make_video(video=False, audio="aac"), {}, 'only sound, no video stream.*of type "audio"'),
        (make_video()[:-300] + bytes(300), {}, "without any frame"),  # its index is gone
        (VIDEO, {"fps": 0}, "fps 0;"),
        (VIDEO, {"fps": -1.0}, "fps -1.0;"),
        (VIDEO, {"fps": math.nan}, "fps nan;"),
        (VIDEO, {"fps": math.inf}, "fps inf;"),
        (VIDEO, {"fps": "2"}, "fps '2';"),
        (VIDEO, {"fps": True}, "fps True;"),
        (grey_frames(), {}, "frames without their rate"),
        (grey_frames(), {"fps": math.nan}, "fps nan;"),
        (grey_frames()[0], {"fps": 1}, r"shape \[48, 64, 3\]. Give frames"),
        (grey_frames()[:0], {"fps": 1}, "without frames"),
        ([], {"fps": 1}, "without frames"),
        (grey_frames() * 2.0, {"fps": 1}, r"video\[1\] is an array of floats"),
        ([np.zeros((4, 4, 3), np.uint8), "/nowhere.png"], {"fps": 1}, r"video\[1\]: /nowhere.png"),
        ([np.zeros((4, 5)), np.zeros((4, 5)), np.zeros((5, 4))], {"fps": 1}, "at 2, of 4 x 5"),
        (np.zeros((2, 1, 201, 3), np.uint8), {"fps": 1}, "201.0 times"),
        (object(), {"fps": 1}, "neither a path, bytes nor frames, but object"),
        (5, {"fps": 1}, "but int"),
    ):
        with pytest.raises(VideoError, match=rf"(?s)^here.*{said}"):
            load(video, audio_rate=RATE, **item)


def test_what_is_too_long_is_refused_before_it_is_decoded() -> None:
    """The check is told of the frames that there would be, and none of them is made."""
    told = []

    def refuse(header: VideoHeader) -> None:
        told.append(header)
        raise PromptTooLongError("too long")

    item = {"type": "video", "video": make_video(30), "fps": 10.0}
    with pytest.raises(PromptTooLongError):
        load_video(item, "here", audio_rate=None, check=refuse)
    assert told == [VideoHeader(10, *SIZE, 1.0, 0.0)]


@pytest.mark.parametrize(("codec", "kind"), [(b"avc1", "video"), (b"sowt", "audio")])
def test_a_codec_without_a_decoder_is_refused(codec, kind) -> None:
    data = make_video(container="mov", codec="libx264", audio="pcm_s16le")
    assert data.count(codec) >= 1
    with pytest.raises(VideoError, match=f"^here: .* the {kind} codec of {len(data)} bytes"):
        load_video({"video": data.replace(codec, b"zzzz")}, "here", audio_rate=16000)


def test_sound_that_is_too_long_is_not_decoded_to_its_end() -> None:
    item = {"video": make_video(audio="aac", audio_s=9.0)}
    with pytest.raises(PromptTooLongError, match=r"^here \(its audio\) lasts 2.* most 2\.000 s"):
        load_video(item, "here", audio_rate=16000, limit_s=2.0)


def test_the_cover_of_a_song_is_no_video() -> None:
    import av
    from av.stream import Disposition

    song = io.BytesIO()
    with av.open(song, "w", format="mp4") as out:
        cover: Any = out.add_stream("mjpeg")
        cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
        cover.disposition = Disposition.attached_pic.value
        track: Any = out.add_stream("aac", rate=RATE, layout="mono")
        picture = av.VideoFrame.from_ndarray(grey_frames(1)[0], format="rgb24")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, RATE), np.float32), "fltp", "mono")
        sound.sample_rate = RATE
        for stream, frame in ((cover, picture), (track, sound)):
            out.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(VideoError, match="only sound, no video stream"):
        load(song.getvalue())


def test_a_playlist_opens_no_other_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret.mp4").write_bytes(make_video())
    Path("list.ffconcat").write_text("ffconcat version 1.0\nfile secret.mp4\n")
    for source in ("list.ffconcat", Path("list.ffconcat").read_bytes()):
        with pytest.raises(VideoError, match="is of an unknown format"):
            load(source)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts files as Linux does")
def test_no_file_stays_open(tmp_path) -> None:
    path, broken = tmp_path / "video.mp4", tmp_path / "broken.mp4"
    path.write_bytes(VIDEO)
    broken.write_bytes(VIDEO[:-500])

    def use() -> None:
        load(path, audio_rate=RATE)
        with pytest.raises(VideoError):
            load(broken)

    use()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        use()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
