"""Sound files of the formats that are read give the samples of their decoder; no loss is silent."""

import io
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from av.stream import Disposition

from qwen3_omni_neuron.errors import AudioError, PromptTooLongError, VideoError
from qwen3_omni_neuron.prompt.media import container
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.video import load_video
from testing.made_recordings import FRAGMENTS, make_matroska, make_recording, tone
from testing.made_videos import make_video

RATE = 16000
Make = Callable[[], bytes]
QUIET = np.arange(-160, 160, dtype="<i2").tobytes()  # 20 ms


def chirp(rate: int, seconds: float, channels: int = 1, hertz: float = 200.0) -> np.ndarray:
    """Return float32 [samples, channels]: a tone that rises, so that no two parts are alike."""
    t = np.arange(round(rate * seconds)) / rate
    wave = np.sin(2 * np.pi * hertz * (t + t * t)) / 3
    return np.stack([wave / (i + 1) for i in range(channels)], axis=1).astype(np.float32)


def written(kind: str, rate: int = RATE, seconds: float = 1.0, channels: int = 1, **more: Any):
    file = io.BytesIO()
    soundfile.write(file, chirp(rate, seconds, channels), rate, format=kind, **more)
    return file.getvalue()


def mpeg(rate: int = 44100, bits: int = 128_000, channels: int = 1, xing: bool = False) -> bytes:
    """Return an MP3 of 1.5 s; without its header of the length, as written to a pipe."""
    target = io.BytesIO()
    layout = "mono" if channels == 1 else "stereo"
    with av.open(target, "w", format="mp3", options={"write_xing": str(int(xing))}) as out:
        stream: Any = out.add_stream("mp3", rate=rate, layout=layout)
        stream.codec_context.bit_rate = bits
        samples = np.ascontiguousarray(chirp(rate, 1.5, channels).T)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return target.getvalue()


def surround() -> bytes:
    """Return an MP4 with AAC of 7.1 channels."""
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as out:
        stream: Any = out.add_stream("aac", rate=48000, layout="7.1")
        samples = np.ascontiguousarray(chirp(48000, 1.0, 8).reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(samples, format="flt", layout="7.1")
        frame.sample_rate, frame.pts = 48000, 0
        for part in av.AudioResampler(format="fltp", frame_size=1024).resample(frame):
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return target.getvalue()


def with_data_size(content: bytes, size: int) -> bytes:
    at = content.index(b"data") + 4
    return content[:at] + struct.pack("<I", size) + content[at + 4 :]


def by_pyav(content: bytes) -> tuple[np.ndarray, int]:
    """Return the mono samples of PyAV's decoder, packet by packet, and their rate."""
    parts, rate = [], 0
    with av.open(io.BytesIO(content)) as file:
        for packet in file.demux(audio=0):
            for frame in packet.decode():
                # Not "fltp": PyAV crashes over 8 planes.
                for packed in av.AudioResampler(format="flt").resample(frame):
                    rate = rate or packed.sample_rate
                    samples = packed.to_ndarray().reshape(-1, packed.layout.nb_channels)
                    parts.append(samples.mean(axis=1))
    return np.concatenate(parts), rate


def read(content: bytes | Path, rate: int = RATE, **more: Any) -> tuple[np.ndarray, list[str]]:
    """Return the samples and the warnings."""
    warnings: list[str] = []
    heard = load_waveform({"audio": content, **more}, rate, "here", warn=warnings.append)
    return heard, warnings


WHOLE: dict[str, Make] = {
    "mp3": lambda: mpeg(xing=True),
    "mp3-without-a-length": mpeg,
    "mp3-after-zeros": lambda: bytes(3000) + mpeg(),
    "mp3-of-22-khz": lambda: mpeg(22050, 48_000),
    "mp3-stereo": lambda: mpeg(channels=2, xing=True),
    "aac": lambda: make_recording("adts", "aac"),
    "flac-piped": lambda: make_recording("flac", "flac", streamed=True),
    "flac-in-ogg": lambda: make_recording("ogg", "flac", channels=2),
    "wav-of-size-0": lambda: with_data_size(written("WAV"), 0),
    "mpeg-ts": lambda: make_recording("mpegts", "aac"),
    "avi": lambda: make_recording("avi", "mp3", rate=44100),
    "avi-piped": lambda: make_recording("avi", "mp3", rate=44100, streamed=True),
    "aac-of-8-channels": surround,
    "webm-opus": lambda: make_recording("webm", "libopus"),
    "webm-opus-streamed": lambda: make_recording("webm", "libopus", channels=2, streamed=True),
    "webm-vorbis": lambda: make_recording("webm", "vorbis", rate=44100, channels=2),
    "mp4-aac": lambda: make_recording("mp4", "aac", rate=44100),
    "mp4-aac-fragmented": lambda: make_recording("mp4", "aac", options=FRAGMENTS, streamed=True),
    "mp4-opus": lambda: make_recording("mp4", "libopus", channels=2),
    "m4a-aac": lambda: make_recording("ipod", "aac", channels=2),
    "m4a-alac": lambda: make_recording("ipod", "alac"),
    "matroska-pcm": lambda: make_recording("matroska", "pcm_s16le", rate=22050),
    "matroska-compressed": lambda: make_matroska([QUIET] * 50, packed=True),
    "matroska-piped": lambda: make_recording("matroska", "mp3", rate=8000, streamed=True),
    "mov": lambda: make_recording("mov", "aac"),
    "video-with-sound": lambda: make_video(container="mp4", audio="aac"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_samples_are_those_of_pyav_packet_by_packet(name, capfd) -> None:
    content = WHOLE[name]()
    expected, rate = by_pyav(content)
    heard, warnings = read(content, rate)
    assert len(heard) == len(expected)
    assert np.abs(heard - expected).max() < 1e-6
    assert warnings == []
    assert capfd.readouterr() == ("", ""), "a decoder prints nothing"


BY_SOUNDFILE: dict[str, Make] = {
    "wav": lambda: written("WAV"),
    "wav-of-24-bits": lambda: written("WAV", 44100, channels=2, subtype="PCM_24"),
    "wav-of-doubles": lambda: written("WAV", subtype="DOUBLE"),
    "wav-of-ulaw": lambda: written("WAV", 8000, subtype="ULAW"),
    "wav-of-size-of-all-ones": lambda: with_data_size(written("WAV"), 2**32 - 1),
    "rf64": lambda: written("RF64", channels=8),
    "aiff": lambda: written("AIFF", 22050),
    "flac": lambda: written("FLAC", 44100, channels=2),
    "vorbis": lambda: written("OGG", 44100, channels=2, subtype="VORBIS"),
    "opus": lambda: written("OGG", 48000, subtype="OPUS"),
}


def test_samples_are_those_of_libsndfile(monkeypatch) -> None:
    for av_module in (av, None):
        monkeypatch.setitem(sys.modules, "av", av_module)
        for name, make in BY_SOUNDFILE.items():
            expected, rate = soundfile.read(io.BytesIO(make()), dtype="float32", always_2d=True)
            heard, warnings = read(make(), rate)
            assert np.array_equal(heard, expected.mean(axis=1)), name
            assert warnings == [], name


def test_without_pyav_only_files_that_need_it_are_refused(monkeypatch) -> None:
    contents = {name: make() for name, make in WHOLE.items()}
    monkeypatch.setitem(sys.modules, "av", None)
    for content in contents.values():
        with pytest.raises(
            AudioError, match=r"PyAV.*pip install 'qwen3-omni-neuron\[video\]'; or send WAV"
        ):
            read(content)


LONG: dict[str, Make] = {
    "wav": lambda: written("WAV", seconds=3.0),
    "aiff": lambda: written("AIFF", seconds=3.0),
    "flac": lambda: written("FLAC", seconds=3.0),
    "mp3": lambda: mpeg(xing=True),
    "aac": lambda: make_recording("adts", "aac", seconds=3.0),
    "mp4": lambda: make_recording("mp4", "aac", seconds=3.0, options={"moov_size": "9000"}),
    "mp4-fragmented": lambda: make_recording(
        "mp4", "aac", seconds=3.0, options=FRAGMENTS, streamed=True
    ),
    "webm": lambda: make_recording("webm", "libopus", seconds=3.0),
    "avi": lambda: make_recording("avi", "pcm_s16le", rate=44100, seconds=3.0),
    "vorbis": lambda: written("OGG", seconds=20.0, subtype="VORBIS"),
    "opus": lambda: written("OGG", 48000, seconds=20.0, subtype="OPUS"),
    "flac-in-ogg": lambda: make_recording("ogg", "flac", seconds=3.0),
}


@pytest.mark.parametrize("name", LONG)
def test_no_loss_is_silent(name, capfd) -> None:
    """Read a file that is cut short, one of two that are joined, and one with bytes behind it."""
    whole = LONG[name]()
    heard = read(whole)[0]
    cut = whole[: len(whole) // 2 + 3]
    for content, sounds in ((cut, 1), (whole * 2, 2), (whole + bytes(40_000), 1)):
        if sounds == 1 and content is not cut and name.startswith(("mp4", "webm", "avi")):
            continue  # what follows may be an index
        try:
            part, warnings = read(content)
        except AudioError as refused:
            assert re.match(r"here: \d+ bytes ", str(refused))
            continue
        complete = len(part) >= 0.98 * sounds * len(heard) and content is not cut
        assert warnings or complete, (len(part), len(heard))
        for warning in warnings:
            assert re.match(r"here: the file is incomplete: .* \d+\.\d\d s are used\.$", warning)
        sure = min(len(part), len(heard)) - RATE // 10  # the last frame may lack its half
        assert sure > 0.2 * len(heard)
        assert np.abs(part[:sure] - heard[:sure]).max() < 1e-6
    assert capfd.readouterr() == ("", "")


def without(content: bytes, mark: bytes, first: int, count: int) -> bytes:
    """Return a file without the parts number `first` on, each of which begins with a mark."""
    starts = [found.start() for found in re.finditer(re.escape(mark), content)]
    return content[: starts[first]] + content[starts[first + count] :]


def overwritten(content: bytes, share: float, count: int = 400) -> bytes:
    at = int(share * len(content))
    return content[:at] + bytes(count) + content[at + count :]


CLUSTER, PAGE, TS = b"\x1f\x43\xb6\x75", b"OggS\0", b"\x47\x41\x00"
LONG_S = 8.0


def made(form: str, codec: str, **more: Any) -> bytes:
    return make_recording(form, codec, seconds=LONG_S, **more)


def ogg(subtype: str) -> bytes:
    return written("OGG", 48000, LONG_S, subtype=subtype)


HOLES: dict[str, Make] = {
    "one-packet": lambda: without(make_matroska([QUIET] * 400), CLUSTER, 40, 1),
    "many-packets": lambda: without(make_matroska([QUIET] * 400), CLUSTER, 10, 60),
    "matroska-opus": lambda: overwritten(made("matroska", "libopus"), 0.3),
    "flac-piped": lambda: without(made("flac", "flac", streamed=True), b"\xff\xf8", 9, 1),
    "opus-page": lambda: overwritten(ogg("OPUS"), 0.6, 1),
    "opus-first-page": lambda: overwritten(ogg("OPUS"), 0.06, 1),
    "vorbis-first-page": lambda: overwritten(ogg("VORBIS"), 0.3, 1),
    "flac-in-ogg": lambda: without(made("ogg", "flac"), PAGE, 3, 1),
    "mpeg-ts": lambda: without(made("mpegts", "aac"), TS, 3, 4),
}


@pytest.mark.parametrize("name", HOLES)
def test_a_missing_stretch_is_named(name) -> None:
    """The sound that is heard and the stretch that is named are the whole file."""
    heard, (warning,) = read(HOLES[name]())
    ((missing, at),) = re.findall(r"(\d+\.\d\d) s are missing at (\d+\.\d\d) s", warning)
    assert 0 < float(missing) < LONG_S - float(at) + 0.05
    assert len(heard) / RATE + float(missing) == pytest.approx(LONG_S, abs=0.07)


def test_an_end_that_is_missing_is_said() -> None:
    for content, said in (
        (overwritten(ogg("OPUS"), 0.99, 1), "its last page is missing"),
        (without(made("avi", "mp3", rate=44100), b"00wb", 9, 9), "header says"),
    ):
        assert said in read(content)[1][0]


def test_chained_ogg_is_heard_whole() -> None:
    first, second = ogg("OPUS"), written("OGG", 48000, 2.0, subtype="OPUS")
    assert len(read(first + second)[0]) == pytest.approx((LONG_S + 2) * RATE, abs=1000)


def two_tracks(form: str, default: int | None) -> bytes:
    """Return a video with tones of 300 and of 1000 Hz, one of which is marked as default."""
    target = io.BytesIO()
    with av.open(target, "w", format=form) as out:
        frames: Any = out.add_stream("mpeg4", rate=1)
        frames.width, frames.height, frames.pix_fmt = 64, 48, "yuv420p"
        tracks: list[Any] = [out.add_stream("aac", rate=RATE, layout="mono") for _ in range(2)]
        for index, track in enumerate(tracks):
            track.disposition = Disposition.default.value if index == default else 0
        for track, hertz in zip(tracks, (300, 1000), strict=True):
            wave = np.sin(2 * np.pi * hertz * np.arange(RATE) / RATE).astype(np.float32) / 2
            frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
            frame.sample_rate = RATE
            out.mux([*track.encode(frame), *track.encode(None)])
        picture = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
        out.mux([*frames.encode(picture), *frames.encode(None)])
    return target.getvalue()


@pytest.mark.parametrize("form", ["matroska", "mp4", "mpegts"])
@pytest.mark.parametrize("default", [None, 0, 1])
def test_the_default_track_is_heard(form, default) -> None:
    second, content = default == 1 and form != "mpegts", two_tracks(form, default)
    heard, said = read(content)
    load_video({"video": content}, "here", audio_rate=RATE, warn=said.append)
    assert np.abs(np.fft.rfft(heard)).argmax() * RATE / len(heard) == pytest.approx(
        1000 if second else 300, abs=5
    )
    track = "2, the default" if second else "1, the (default|first)"
    for warning in said:
        assert re.match(rf"here: \d+ bytes has 2 audio tracks\. Track {track}, is used", warning)
    assert len(said) == 2


def test_what_can_not_be_decoded_is_counted() -> None:
    content = bytearray(make_recording("adts", "aac", seconds=2.0))
    starts = [m.start() for m in re.finditer(rb"\xff\xf1", bytes(content))]
    for at in starts[20:23]:
        content[at + 7 : at + 60] = b"\xff" * 53
    heard, (warning,) = read(bytes(content))
    assert re.search(r"\d packets can't be decoded.* Its 1\.\d\d s are used", warning)
    assert 1.7 * RATE < len(heard) < 2.05 * RATE


def test_a_flac_whose_middle_is_damaged_is_used_up_to_there() -> None:
    content = bytearray(written("FLAC", seconds=4.0))
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(8)
    heard, (warning,) = read(bytes(content))
    assert re.search(r"the decoder stopped .* says 4\.00 s", warning)
    assert np.array_equal(heard, read(written("FLAC", seconds=4.0))[0][: len(heard)])
    assert len(heard) > RATE


def test_the_text_of_a_tag_is_no_header_of_an_mp3() -> None:
    """A variable rate misleads FFmpeg's guess of the length; only a header is held to it."""
    content = mpeg(bits=320_000) + mpeg(bits=32_000)
    content = content[content.index(b"\xff\xfb") :]  # without its own tag
    comment = b"COMM\0\0\0\x1c\0\0\0eng\0Info ABCDEFG hello there"
    heard, warnings = read(b"ID3\3\0\0\0\0\0" + bytes([len(comment)]) + comment + content)
    assert np.array_equal(heard, read(content)[0])
    assert not any("header says" in warning for warning in warnings)


def test_frames_of_another_rate_are_resampled() -> None:
    """In one stream, as where MP3 files are joined; the lengths are those of its packets."""
    heard, warnings = read(mpeg(44100) + mpeg(32000, channels=2), 44100)
    assert len(heard) == pytest.approx(2 * 1.55 * 44100, rel=0.02)
    assert "changes from 44100 Hz and 1 channels to " in warnings[0]
    second = chirp(44100, 1.5)[:, 0] * 0.75  # the mean of its channels
    part = second[20_000:60_000]
    lags = [np.corrcoef(heard[n : n + 40_000], part)[0, 1] for n in range(87_000, 92_000)]
    assert max(lags) > 0.999


def test_a_file_of_too_many_packets_is_refused(monkeypatch) -> None:
    content, video = mpeg(), make_video()
    said = r"^here: \d+ bytes has more than 20 packets\. Send a part of it\.$"
    monkeypatch.setattr(container, "MOST_PACKETS", 20)
    with pytest.raises(AudioError, match=said):
        read(content)
    with pytest.raises(VideoError, match=said):
        load_video({"video": video}, "here", audio_rate=None)
    monkeypatch.setattr(container, "MOST_PACKETS", 200)
    assert len(read(content)[0]) > RATE
    assert len(load_video({"video": video}, "here", audio_rate=None).frames)


@pytest.mark.parametrize("form", ["webm", "mp4"])
def test_what_a_codec_adds_at_the_beginning_is_left_out(form) -> None:
    """Opus begins with 312 samples that are no sound, which its container says."""
    heard = read(make_recording(form, "libopus", seconds=2.0))[0]
    assert len(heard) == pytest.approx(2 * RATE, abs=400)
    middle = slice(RATE // 2, RATE)
    assert np.abs(heard[middle] - tone(RATE, 2.0)[0][middle]).max() < 0.05


def with_durations_of(content: bytes, ticks: int) -> bytes:
    """Return an MP4 whose table says that every packet lasts `ticks`."""
    table = content.index(b"stts") + 8
    (entries,) = struct.unpack_from(">I", content, table)
    changed = bytearray(content)
    for entry in range(entries):
        struct.pack_into(">I", changed, table + 8 + 8 * entry, ticks)
    return bytes(changed)


def test_a_file_that_is_longer_than_it_says_is_checked_as_it_grows() -> None:
    content = with_durations_of(make_recording("mp4", "aac", seconds=4.0), 100)
    checked: list[float] = []
    heard = load_waveform({"audio": content}, RATE, "here", check=checked.append)
    assert len(heard) > 3.8 * RATE
    assert len(checked) > 1
    assert checked[0] < 1
    assert 3.8 < checked[-1] <= len(heard) / RATE + 0.1
    with pytest.raises(PromptTooLongError, match=r"or more, but the context fits at most 2\.000 s"):
        load_waveform({"audio": content}, RATE, "here", limit_s=2.0)


def test_a_small_file_of_hours_is_refused() -> None:
    """Zlib makes a thousand bytes of one: 200 kB become 94 minutes."""
    content = make_matroska([bytes(9_000_000)] * 20, packed=True)
    assert len(content) < 200_000
    with pytest.raises(PromptTooLongError, match=r"at most 60\.000 s"):
        load_waveform({"audio": content}, RATE, "here", limit_s=60.0)
    content = make_recording("mp4", "aac", seconds=4.0)
    with pytest.raises(PromptTooLongError, match=r"^here lasts 4\.0\d\d s, .* most 2\.000 s"):
        load_waveform({"audio": content}, RATE, "here", limit_s=2.0)


# audio_start and audio_end, in seconds, by the file's own samples.


@pytest.mark.parametrize("rate", [RATE, 44100])
@pytest.mark.parametrize("kind", ["array", "pair", "arriving", "WAV", "FLAC", "OGG", "MP3"])
def test_only_what_is_between_is_used(kind, rate) -> None:
    samples = chirp(rate, 2.0)[:, 0]
    given: Any = {
        "array": samples,
        "pair": (samples, rate),
        "arriving": iter(np.split(samples, 10)),
    }.get(kind)
    if given is None:
        given = written(kind, rate, 2.0)
    again = chirp(rate, 2.0)[:, 0] if kind == "arriving" else given
    whole = read(again, rate, sampling_rate=rate)[0] if kind != "arriving" else again
    for start, end in ((0.25, 1.5), (0, 0.5), (1.25, None), (0.5, 99), (None, 1)):
        if kind == "arriving":
            given = iter(np.split(samples, 10))
        more = {"audio_start": start, "audio_end": end, "sampling_rate": rate}
        heard, warnings = read(given, rate, **more)
        first = round((start or 0) * rate)
        assert np.array_equal(heard, whole[first : None if end is None else round(end * rate)])
        assert warnings == []


def test_nothing_after_the_end_is_read() -> None:
    taken = []

    def microphone() -> Iterator[np.ndarray]:
        for index in range(100):
            taken.append(index)
            yield np.zeros(1600, np.float32)

    assert len(read(microphone(), sampling_rate=RATE, audio_end=0.45)[0]) == 0.45 * RATE
    assert taken == [0, 1, 2, 3, 4]
    whole = written("FLAC", seconds=3.0)
    for content in (whole[: len(whole) // 2], make_recording("adts", "aac", seconds=3.0)[:-7]):
        assert read(content)[1]
        assert read(content, audio_end=1.0)[1] == []


def test_limits_count_the_part_alone() -> None:
    content, checked = written("WAV", seconds=3.0), []
    item = {"audio": content, "audio_start": 1.0, "audio_end": 1.5}
    assert len(load_waveform(item, RATE, "here", limit_s=0.5, check=checked.append)) == RATE // 2
    assert checked == [0.5]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"audio_start": 2.0}, r"has audio_start 2 s, but lasts 1\.000 s. Give an earlier"),
        ({"audio_start": 0.99}, r"lasts 0\.010 s"),
    ],
)
def test_what_is_no_part_is_refused(given, said) -> None:
    pieces = [chirp(RATE, 0.5)[:, 0]] * 2
    for audio in (written("WAV"), np.concatenate(pieces), iter(pieces)):
        with pytest.raises(AudioError, match=f"^here.*{said}"):
            read(audio, sampling_rate=RATE, **given)


OTHERS: dict[str, bytes] = {
    "WMA or WMV": bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c") + bytes(700),
    "CAF": b"caff\0\1\0\0desc",
    "AU": b".snd" + bytes(40),
    "W64": b"riff\x2e\x91\xcf\x11" + bytes(8) + b"\x10" * 150,  # sizes above 2 ** 60
    "AMR": b"#!AMR\n" + bytes(99),
    "AC-3": b"\x0b\x77" + bytes(99),
    "Ogg with Speex": b"OggS\0\2" + bytes(22) + b"Speex   1.2",
    "Ogg without Vorbis or Opus": b"OggS\0\2" + bytes(22) + b"\x80theora",
    "FLV": b"FLV\1\5",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_named_and_not_opened(name, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(container, "opened", None)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    path = tmp_path / "x"
    path.write_bytes(OTHERS[name])
    for source in (OTHERS[name], path):
        said = rf"^here: .* is {name}, which is not supported\. Convert it, .*ffmpeg -i "
        with pytest.raises(AudioError, match=said):
            read(source)


BAD: dict[str, tuple[Make, str]] = {
    "only-video": (make_video, "has no sound, only video. Send a recording with sound"),
    "a-picture": (
        lambda: b"\x89PNG\r\n\x1a\n" + bytes(40),
        r"is a picture \(PNG\).*\(image_url over HTTP\)",
    ),
    "text": (lambda: b"one two three", "is of an unknown format.*Formats of audio: WAV, FLAC, Ogg"),
    "wav-without-samples": (lambda: written("WAV", seconds=0.0), "no sound that can be decoded"),
    "flac-without-a-frame": (lambda: written("FLAC")[:100], "is damaged: the decoder stopped"),
    "frames-of-mp3-without-sound": (lambda: b"\xff\xfb" * 900, "can't be decoded as audio"),
    "no-streams": (lambda: make_matroska([])[:60], "can't be decoded as audio"),
    "no-packets": (lambda: make_matroska([]), "no sound that can be decoded|can't be decoded"),
    "header-alone": (lambda: make_recording("mp4", "aac")[:200], "can't be decoded as audio"),
    "no-decoder": (lambda: make_matroska([QUIET], codec="A_NONE"), "no decoder"),
    "without-its-codecs-header": (
        lambda: make_matroska([QUIET] * 9, codec="A_VORBIS"),
        "has no sound that can be decoded",
    ),
    "more-packets-than-the-file-has": (
        lambda: with_many_packets(make_recording("mp4", "aac")),
        "has no sound that can be decoded",
    ),
    "rate-of-1-hz": (lambda: make_matroska([QUIET], rate=1), "sampling_rate of 1 Hz"),
    "shorter-than-a-frame": (lambda: make_matroska([QUIET]), "lasts 0.020 s"),
}


def with_many_packets(content: bytes) -> bytes:
    """Return an MP4 whose table says that it has 2 ** 31 packets of one byte."""
    table = content.index(b"stsz") + 8
    changed = bytearray(content)
    struct.pack_into(">II", changed, table, 1, 2**31)
    return bytes(changed)


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_cause(name, capfd) -> None:
    make, said = BAD[name]
    with pytest.raises(AudioError, match=f"^here.*({said})") as refused:
        read(make())
    for words in ("Unspecified", "only nothing", " at 0x", "<none>", "Errno"):
        assert words not in str(refused.value)
    assert capfd.readouterr() == ("", "")
