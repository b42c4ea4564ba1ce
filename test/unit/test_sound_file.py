"""Sound files are read to their end, whatever their headers say; what can't be is said."""

import io
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from qwen3_omni_neuron.errors import AudioError, PromptTooLongError, VideoError
from qwen3_omni_neuron.prompt.media import container, joined, sound_file
from qwen3_omni_neuron.prompt.media.audio import load_waveform, open_audio
from qwen3_omni_neuron.prompt.media.container import SOUND_NAMES, WITHOUT_PYAV
from qwen3_omni_neuron.prompt.media.cut_short import promised_by_frames
from qwen3_omni_neuron.prompt.media.video import load_video
from testing.made_recordings import FRAGMENTS, make_matroska, make_recording
from testing.made_videos import make_video

RATE = 16000
Make = Callable[[], bytes]


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


def wma() -> bytes:
    target = io.BytesIO()
    with av.open(target, "w", format="asf") as out:
        stream: Any = out.add_stream("wmav2", rate=44100, layout="mono")
        stream.codec_context.bit_rate = 64_000
        samples = np.ascontiguousarray(chirp(44100, 1.5).T)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 44100, 0
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


def by_packets(content: bytes) -> tuple[np.ndarray, int]:
    """Return the mono samples of PyAV's decoder, packet by packet, and their rate."""
    parts, rate = [], 0
    with av.open(io.BytesIO(content)) as container:
        for packet in container.demux(audio=0):
            try:
                frames = packet.decode()
            except av.FFmpegError:
                continue
            for frame in frames:
                # Not "fltp": PyAV crashes over 8 planes.
                for packed in av.AudioResampler(format="flt").resample(frame):
                    rate = rate or packed.sample_rate
                    samples = packed.to_ndarray().reshape(-1, packed.layout.nb_channels)
                    parts.append(samples.mean(axis=1))
    return np.concatenate(parts), rate


def read(content: bytes, rate: int = RATE, **more: Any) -> tuple[np.ndarray, list[str]]:
    """Return the samples and the warnings."""
    warnings: list[str] = []
    heard = load_waveform({"audio": content, **more}, rate, "here", warn=warnings.append)
    return heard, warnings


def assert_alike(heard: np.ndarray, expected: np.ndarray) -> None:
    assert abs(len(heard) - len(expected)) <= 2
    count = min(len(heard), len(expected))
    assert np.corrcoef(heard[:count], expected[:count])[0, 1] > 0.999


WHOLE: dict[str, Make] = {
    "mp3": lambda: mpeg(xing=True),
    "mp3-joined-of-two-bit-rates": lambda: mpeg(bits=320_000) + mpeg(bits=32_000),
    "mp3-joined-with-headers": lambda: mpeg(xing=True) + mpeg(bits=64_000, xing=True),
    "mp3-after-zeros": lambda: bytes(3000) + mpeg(),
    "mp3-after-a-tag": lambda: b"ID3\4\0\0\0\0\1\0" + bytes(128) + mpeg(),
    "mp3-of-22-khz": lambda: mpeg(22050, 48_000),
    "aac": lambda: make_recording("adts", "aac"),
    "ac3": lambda: make_recording("ac3", "ac3"),
    "amr": lambda: make_recording("amr", "amr_nb", rate=8000),
    "wma": wma,
    "flac-piped": lambda: make_recording("flac", "flac", streamed=True),
    "flac-in-ogg": lambda: make_recording("ogg", "flac", channels=2),
    "alac-in-caf": lambda: make_recording("caf", "alac"),
    "wav-of-size-0": lambda: with_data_size(written("WAV"), 0),
    "wav-of-size-of-all-ones": lambda: with_data_size(written("WAV"), 2**32 - 1),
    "wav-of-64-bit-integers": lambda: make_recording("wav", "pcm_s64le"),
    "wav-of-mp3": lambda: make_recording("wav", "mp3", rate=44100),
    "mpeg-ts": lambda: make_recording("mpegts", "aac"),
    "avi": lambda: make_recording("avi", "mp3", rate=44100),
    "flac": lambda: written("FLAC", 44100, channels=2),
    "aiff": lambda: written("AIFF", 22050),
    "au": lambda: written("AU", 8000, subtype="ULAW"),
    "w64": lambda: written("W64", 96000, subtype="PCM_24"),
    "aac-of-8-channels": surround,
    "rf64": lambda: written("RF64", channels=8),
}


@pytest.mark.parametrize("name", WHOLE)
def test_samples_are_those_of_pyav_packet_by_packet(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    content = WHOLE[name]()
    expected, rate = by_packets(content)
    heard, warnings = read(content, rate)
    assert_alike(heard, expected)
    assert warnings == ([] if "joined" not in name else warnings)
    assert capfd.readouterr() == ("", ""), "a decoder prints nothing"


NAMED: dict[str, Make] = {
    "WAV": lambda: written("WAV"),
    "AIFF": lambda: written("AIFF"),
    "AU": lambda: written("AU"),
    "CAF": lambda: written("CAF"),
    "FLAC": lambda: written("FLAC"),
    "Ogg (Vorbis": lambda: written("OGG", subtype="VORBIS"),
    "Opus": lambda: written("OGG", 48000, subtype="OPUS"),
    "FLAC in Ogg": WHOLE["flac-in-ogg"],
    "MP3": WHOLE["mp3"],
    "AAC": WHOLE["aac"],
    "AC-3": WHOLE["ac3"],
    "AMR": WHOLE["amr"],
    "WMA": WHOLE["wma"],
    "WebM": lambda: make_recording("webm", "libopus"),
    "Matroska": lambda: make_recording("matroska", "aac"),
    "MP4": lambda: make_recording("mp4", "aac"),
    "M4A": lambda: make_recording("ipod", "aac"),
    "AVI": WHOLE["avi"],
    "MPEG-TS": WHOLE["mpeg-ts"],
}


def test_each_format_that_errors_name_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    named = re.split(r", | and ", SOUND_NAMES.replace(" and ", ", ").replace(")", ""))
    # No encoder of Speex is here.
    assert {*named, "FLAC in Ogg"} == {*NAMED, "Speex"}
    for name, make in NAMED.items():
        assert len(read(make())[0]) > 0.9 * RATE, name
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    for name in re.findall(r"\w+(?: \(\w+)?", WITHOUT_PYAV.replace("or ", "")):
        assert len(read(NAMED[name]())[0]) == RATE, name


@pytest.mark.parametrize(
    ("kind", "channels"),
    [("HTK", 1), ("MAT4", 1), ("MAT4", 2), ("MPC2K", 1), ("MPC2K", 2), ("WVE", 1), ("XI", 1)],
)
def test_formats_that_only_libsndfile_knows_are_read(kind: str, channels: int) -> None:
    rate = 8000 if kind == "WVE" else RATE
    for endian in ("LITTLE", "BIG") if kind == "MAT4" else ("FILE",):
        content = written(kind, rate, channels=channels, endian=endian)
        expected, found = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
        heard, warnings = read(content, found)
        assert np.array_equal(heard, expected.mean(axis=1))
        assert len(heard) == rate
        assert warnings == []


@pytest.mark.parametrize("kind", ["HTK", "MPC2K"])
def test_a_file_that_only_begins_like_one_of_those_is_not_heard(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    head = written(kind)[:42]
    for content in (head, head[:20], head + mpeg()[:-100], head + bytes(99)):
        try:
            heard, _ = read(content)
        except AudioError as reason:
            assert re.match("here: .* can't be read as audio", str(reason))
        else:
            assert len(heard) < 1.7 * RATE  # PyAV found the MP3
    assert capfd.readouterr() == ("", "")


JOINED: dict[str, tuple[Make, ...]] = {
    "wav": (lambda: written("WAV"), lambda: written("WAV", seconds=0.6)),
    "wav-of-two-rates": (lambda: written("WAV"), lambda: written("WAV", 48000, channels=2)),
    "aiff": (lambda: written("AIFF", seconds=0.503), lambda: written("AIFF")),
    "flac": (lambda: written("FLAC"),) * 3,
    "flac-of-two-rates": (lambda: written("FLAC", 44100, channels=2), lambda: written("FLAC")),
    "vorbis": (lambda: written("OGG", subtype="VORBIS"),) * 2,
    "vorbis-of-two-rates": (
        lambda: written("OGG", 22050, subtype="VORBIS"),
        lambda: written("OGG", 44100, channels=2, subtype="VORBIS"),
        lambda: written("OGG", 22050, subtype="VORBIS"),
    ),
    "opus": (lambda: written("OGG", 48000, subtype="OPUS"),) * 2,
    "opus-of-two-layouts": (
        lambda: written("OGG", 48000, subtype="OPUS"),
        lambda: written("OGG", 48000, channels=2, subtype="OPUS"),
    ),
    "opus-after-vorbis": (
        lambda: written("OGG", subtype="VORBIS"),
        lambda: written("OGG", 48000, subtype="OPUS"),
    ),
    "flac-in-ogg": (lambda: make_recording("ogg", "flac"),) * 2,
    "caf": (lambda: written("CAF"), lambda: written("CAF", 44100)),
    "w64": (lambda: written("W64"),) * 3,
    "voc": (lambda: written("VOC"),) * 2,
    "wma": (wma,) * 2,
    "m4a": (lambda: make_recording("ipod", "aac"),) * 2,
    "mp4-of-two-rates": (
        lambda: make_recording("mp4", "aac", rate=44100),
        lambda: make_recording("mp4", "aac", rate=22050, options=FRAGMENTS, streamed=True),
    ),
    "avi": (lambda: make_recording("avi", "pcm_s16le", rate=44100),) * 2,
    "flv": (lambda: make_recording("flv", "aac", rate=44100),) * 2,
    "matroska": (lambda: make_recording("matroska", "flac"),) * 3,
    "matroska-of-two-rates": (
        lambda: make_recording("matroska", "aac", rate=44100, streamed=True),
        lambda: make_recording("matroska", "pcm_s16le", rate=22050),
    ),
    "webm": (lambda: make_recording("webm", "libopus"),) * 2,
    "au-of-two-rates": (lambda: written("AU"), lambda: written("AU", 48000, channels=2)),
    "nist": (lambda: written("NIST"),) * 2,
    "wav-piped": (lambda: make_recording("wav", "pcm_s32le", streamed=True),) * 2,
    "au-piped": (lambda: make_recording("au", "pcm_s16be", streamed=True),) * 2,
    "aiff-piped": (lambda: make_recording("aiff", "pcm_s32be", streamed=True),) * 2,
    "rf64-of-two-rates": (lambda: written("RF64"), lambda: written("RF64", 48000, channels=2)),
    "tta-of-two-layouts": (
        lambda: make_recording("tta", "tta"),
        lambda: make_recording("tta", "tta", channels=2),
    ),
    "wavpack": (lambda: make_recording("wv", "wavpack", channels=2),) * 2,
    "nut": (lambda: make_recording("nut", "pcm_s16le"),) * 3,
    "wtv": (lambda: make_recording("wtv", "mp2"),) * 2,
    "mxf": (lambda: make_recording("mxf_opatom", "pcm_s16le"),) * 2,
    "real-media": (lambda: make_recording("rm", "ac3"),) * 2,
    "ircam": (
        lambda: written("IRCAM", channels=2),
        lambda: make_recording("ircam", "pcm_s16le", rate=RATE, channels=2),
    ),
    "avr": (lambda: written("AVR"),) * 2,
    "paf": (lambda: written("PAF"),) * 2,
    "paf-of-other-order": (lambda: written("PAF", endian="LITTLE"),) * 2,
    "pvf": (lambda: written("PVF"),) * 2,
    "sds": (lambda: written("SDS"),) * 2,
    "mat4": (lambda: written("MAT4", endian="LITTLE"),) * 2,
    "mat4-of-other-order": (lambda: written("MAT4", endian="BIG"),) * 2,
    "mat5": (lambda: written("MAT5"),) * 2,
    "xi": (lambda: written("XI", 44100, subtype="DPCM_16"),) * 2,
}


def first_kind(content: bytes) -> tuple[int, int]:
    """Return the rate of a file and its number of channels."""
    try:
        stream = av.open(io.BytesIO(content)).streams.audio[0]
        return stream.rate, stream.channels
    except av.FFmpegError:
        info = soundfile.info(io.BytesIO(content))
        return info.samplerate, info.channels


@pytest.mark.parametrize("name", JOINED)
def test_joined_files_are_each_read_whole(name: str) -> None:
    contents = [make() for make in JOINED[name]]
    kinds = [first_kind(content) for content in contents]
    rate, channels = kinds[0]
    heard, warnings = read(b"".join(contents), rate)
    expected = np.concatenate([read(content, rate)[0] for content in contents])
    assert np.array_equal(heard, expected)
    if len(set(kinds)) == 1:
        assert warnings == []
    else:
        (warning,) = warnings
        assert warning.startswith(f"here: the file changes from {rate} Hz and {channels} ")
        assert warning.endswith(f"All of it is used, at {rate} Hz.")


BEHIND = {
    "id3v1": b"TAG" + bytes(125),
    "ape": b"APETAGEX\xd0\7\0\0\x28\0\0\0"
    + bytes(4)
    + b"\0\0\0\xa0"
    + bytes(8 + 8)
    + b"APETAGEX\xd0\7\0\0\x28\0\0\0"
    + bytes(4)
    + b"\0\0\0\x80"
    + bytes(8),
}


@pytest.mark.parametrize("tag", BEHIND)
@pytest.mark.parametrize(
    ("kind", "subtype"), [("IRCAM", "FLOAT"), ("W64", "DOUBLE"), ("AU", "FLOAT"), ("AVR", "PCM_16")]
)
def test_a_tag_behind_is_not_heard(kind: str, subtype: str, tag: str) -> None:
    content = written(kind, subtype=subtype)
    heard, warnings = read(content + BEHIND[tag])
    assert warnings == []
    assert np.array_equal(heard, read(content)[0])


@pytest.mark.parametrize("kind", ["AU", "W64"])
def test_what_follows_the_samples_is_not_heard(kind: str) -> None:
    content = written(kind)
    heard, warnings = read(content + b"\x55" * 999)
    assert warnings == []
    assert np.array_equal(heard, read(content)[0])


def test_frames_of_another_rate_are_resampled() -> None:
    """In one stream, as where MP3 files are joined; the lengths are those of its packets."""
    content = mpeg(44100) + mpeg(32000, channels=2)
    heard, warnings = read(content, 44100)
    assert len(heard) == pytest.approx(2 * 1.55 * 44100, rel=0.02)
    assert "changes from 44100 Hz and 1 channels to " in warnings[0]
    second = chirp(44100, 1.5)[:, 0] * 0.75  # the mean of its channels
    part = second[20_000:60_000]
    lags = [np.corrcoef(heard[n : n + 40_000], part)[0, 1] for n in range(87_000, 92_000)]
    assert max(lags) > 0.999


def test_what_can_not_be_read_of_a_joined_file_is_left_out() -> None:
    good = written("FLAC")
    heard, warnings = read(good + b"fLaC\0\0\0\x22" + bytes(500) + good)
    assert len(heard) == 2 * RATE
    assert warnings == [
        "here: of the 3 files that it is joined of, file 2 can't be read. It is left out."
    ]


def test_warnings_that_are_left_out_are_counted() -> None:
    good, broken = written("FLAC"), joined._HEADS[b"fLaC"].pattern + bytes(500)
    for more, counted in (
        (0, []),
        (1, ["here: 1 more warning about this file is left out."]),
        (3, ["here: 3 more warnings about this file are left out."]),
    ):
        content = good + (broken + good) * (4 + more)
        for part in ({}, {"audio_end": 0.5}):
            warnings = read(content, **part)[1]
            assert [re.findall(r"file (\d+) can't be", w) for w in warnings[:4]] == [
                ["2"],
                ["4"],
                ["6"],
                ["8"],
            ]
            assert warnings[4:] == counted


def test_a_bytearray_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy serves all the files that it is joined of."""
    opened = []
    content = bytearray(written("WAV", seconds=0.1) * 5)

    class File(io.BytesIO):
        def __init__(self, content: Any):
            opened.append(content)
            super().__init__(content)

    monkeypatch.setattr(io, "BytesIO", File)
    assert len(load_waveform({"audio": content}, RATE, "here")) == 0.5 * RATE
    assert len(opened) > 10
    assert all(source is opened[0] for source in opened)
    assert isinstance(opened[0], bytes)


def test_a_file_of_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "MOST_JOINED", 3)
    good = written("WAV", seconds=0.1)
    assert len(read(good * 3)[0]) == 0.3 * RATE
    for content in (good * 4, written("FLAC") * 4, written("OGG", subtype="VORBIS") * 4):
        with pytest.raises(AudioError, match="here is joined of more than 3 files"):
            read(content)


class Counting(io.BytesIO):
    """File that counts how often it is read."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        return super().read(size)


def test_pages_of_an_ogg_are_not_read_one_by_one() -> None:
    page = b"OggS\0\0" + bytes(20) + b"\0"
    file = Counting(b"OggS\0\2" + bytes(20) + b"\1\0" + page * 100_000)
    assert joined.find_parts(file, "here") == [joined.Part(0, len(file.getvalue()))]
    assert file.reads < len(file.getvalue()) / 65536 + 20
    with pytest.raises(AudioError, match="can't be read as audio"):
        read(file.getvalue())


def test_an_mp4_of_too_many_boxes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "_MOST_BOXES", 1000)
    file = Counting(b"\0\0\0\x10ftypisom\0\0\0\0" + b"\0\0\0\x08free" * 100_000)
    with pytest.raises(AudioError, match="here is an MP4 of more than 1000 boxes"):
        joined.find_parts(file, "here")
    assert file.reads < 1100


def test_a_file_of_too_many_packets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_sizes_of_64_bits_are_no_places_to_read() -> None:
    """A file may say any; systems and io.BytesIO refuse to go there."""
    mp4 = b"\0\0\0\x10ftypisom\0\0\0\0" + b"\0\0\0\1mdat" + b"\xff" * 8 + bytes(99)
    rf64 = b"RF64" + b"\xff" * 4 + b"WAVEds64\x1c\0\0\0" + b"\xff" * 8 + bytes(99)
    for content in (mp4, rf64):
        with pytest.raises(AudioError, match=f"here: {len(content)} bytes can't be read as audio"):
            read(content)


def test_a_paf_file_of_three_channels_is_not_shifted() -> None:
    """libsndfile loses a channel where its own buffer of 2048 ends, but not of integers."""
    samples = (chirp(RATE, 1.0, 3) * 2.0**31).astype(np.int32)
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="PAF", subtype="PCM_24")
    heard, _ = read(file.getvalue())
    assert np.abs(heard - chirp(RATE, 1.0, 3).mean(axis=1)).max() < 1e-6


@pytest.mark.parametrize("codec", ["pcm_f32le", "pcm_alaw", "pcm_s16le"])
def test_a_w64_of_the_extensible_kind_has_its_codec(codec: str) -> None:
    """libsndfile takes each codec for PCM there."""
    content = make_recording("w64", codec, rate=96000)
    heard, warnings = read(content, 96000)
    expected, _ = by_packets(content)
    assert_alike(heard[:95_000], expected[:95_000])
    assert warnings == []


def test_g721_without_a_length_is_refused() -> None:
    """PyAV decodes noise of it."""
    content = with_data_size(written("WAV", subtype="G721_32"), 0)
    with pytest.raises(AudioError, match=f"here: {len(content)} bytes has sound of G721_32 and no"):
        read(content)


def test_a_rate_that_can_not_be_names_the_file() -> None:
    content = written("WAV", 500)
    with pytest.raises(AudioError, match=f"here: {len(content)} bytes has a sampling_rate of 500"):
        read(content)


WITHOUT_A_LENGTH: dict[str, Make] = {
    "avi": lambda: make_recording("avi", "mp3", rate=44100, streamed=True),
    "caf": lambda: make_recording("caf", "pcm_s16le", streamed=True),
    "matroska": lambda: make_recording("matroska", "mp3", rate=8000, seconds=20.0, streamed=True),
    "matroska-with-delay": lambda: make_recording("matroska", "mp3", rate=8000),
    "swf": lambda: make_recording("swf", "mp3", rate=22050),
    "adx": lambda: make_recording("adx", "adpcm_adx", rate=44100),
    "nut": lambda: make_recording("nut", "pcm_s16le", streamed=True),
    "mpeg": lambda: make_recording("mpeg", "mp2", streamed=True),
    "w64-with-filling": lambda: make_recording("w64", "adpcm_swf", rate=22050, channels=2),
}


@pytest.mark.parametrize("name", WITHOUT_A_LENGTH)
def test_a_whole_file_is_not_said_to_be_cut_short(name: str) -> None:
    """Its header has a length that its writer couldn't know, or none, and FFmpeg guesses one."""
    content = WITHOUT_A_LENGTH[name]()
    expected, rate = by_packets(content)
    heard, warnings = read(content, rate)
    assert warnings == []
    assert_alike(heard, expected)


CUT: dict[str, tuple[Make, str]] = {
    "wav": (lambda: written("WAV", seconds=3.0), "of 3.00 s that its header promises 1.50 s"),
    "wav-of-floats": (
        lambda: written("WAV", seconds=3.0, subtype="DOUBLE"),
        "of 3.00 s that its header promises 1.50 s",
    ),
    "wav-of-64-bit-integers": (
        lambda: make_recording("wav", "pcm_s64le", seconds=3.0),
        "of 3.00 s that its header promises 1.50 s",
    ),
    "aiff": (lambda: written("AIFF", seconds=3.0), "of 3.00 s that its header promises 1.50 s"),
    "au": (lambda: written("AU", seconds=3.0), "of 3.00 s that its header promises 1.50 s"),
    "w64": (lambda: written("W64", seconds=3.0), "of 3.00 s that its header promises 1.50 s"),
    "rf64": (lambda: written("RF64", seconds=3.0), "of 3.00 s that its header promises 1.50 s"),
    "caf": (lambda: written("CAF", seconds=3.0), "its last packet is not whole"),
    "flac": (lambda: written("FLAC", seconds=3.0), "of 3.00 s that its header promises"),
    "flac-piped": (
        lambda: make_recording("flac", "flac", seconds=3.0, streamed=True),
        "its last packet is not whole",
    ),
    "mp3": (lambda: mpeg(xing=True), r"of 1.5\d s that its header promises 0\.\d\d s"),
    "mp3-without-a-header": (mpeg, "its last packet is not whole"),
    "aac": (lambda: make_recording("adts", "aac"), "its last packet is not whole"),
    "opus": (
        lambda: written("OGG", 48000, 3.0, subtype="OPUS"),
        "its last packet is not whole",
    ),
    "flac-in-ogg": (
        lambda: make_recording("ogg", "flac", seconds=3.0),
        "its last packet is not whole",
    ),
    "mp4": (
        lambda: make_recording("mp4", "aac", seconds=3.0, options={"moov_size": "9000"}),
        r"of 3.0\d s that its header promises [01]\.\d\d s",
    ),
    "mp4-fragmented": (
        lambda: make_recording("mp4", "aac", seconds=3.0, options=FRAGMENTS, streamed=True),
        r"of 3.0\d s that its header promises 1\.\d\d s",
    ),
    "webm": (
        lambda: make_recording("webm", "libopus", seconds=3.0),
        r"of 3.0\d s that its header promises 1\.\d\d s",
    ),
    "avi": (
        lambda: make_recording("avi", "mp3", rate=44100, seconds=3.0),
        r"of 2\.\d\d s that its header promises 1\.\d\d s",
    ),
    "mpeg-ts": (lambda: make_recording("mpegts", "aac", seconds=3.0), "its last packet is not"),
    "wma": (wma, r"of 1\.\d\d s that its header promises 0\.\d\d s"),
    "avr": (lambda: written("AVR", seconds=3.0), "of 3.00 s that its header promises 1.50 s"),
    "mat5": (lambda: written("MAT5", seconds=3.0), "of 3.00 s that its header promises 1.50 s"),
    "nist": (lambda: written("NIST", seconds=3.0), "of 3.00 s that its header promises 1.48 s"),
    "voc": (lambda: written("VOC", seconds=3.0), "its last packet is not whole"),
    "aiff-of-adpcm": (
        lambda: make_recording("aiff", "adpcm_ima_ws", rate=22050, seconds=3.0),
        "of 2.99 s that its header promises 1.50 s",
    ),
    "mpeg-ts-of-mp2": (
        lambda: make_recording("mpegts", "mp2", seconds=3.0),
        "its last packet is not whole",
    ),
    "mpeg": (lambda: make_recording("mpeg", "mp2", seconds=3.0), "its last packet is not whole"),
    "ac3": (
        lambda: make_recording("ac3", "ac3", rate=44100, seconds=3.0),
        "its last packet is not whole",
    ),
    "nut": (
        lambda: make_recording("nut", "pcm_s16le", seconds=3.0),
        "its last packet is not whole",
    ),
    "mxf": (
        lambda: make_recording("mxf_opatom", "pcm_s16le", seconds=3.0),
        r"of 3\.\d\d s that its header promises 1\.\d\d s",
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_of_a_file_cut_short_what_is_there_is_used_and_said(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make, said = CUT[name]
    content = make()
    rate = RATE if name == "mat5" else by_packets(content)[1]  # PyAV doesn't read it
    (whole, nothing), (part, warnings) = (
        read(data, rate) for data in (content, content[: len(content) // 2 + 3])
    )
    assert nothing == []
    (warning,) = warnings
    assert re.match(f"here: the file is cut short: {said}", warning)
    found = float(re.findall(r"([\d.]+)\s+s (?:are there|that can)", warning)[0])
    assert found == pytest.approx(len(part) / rate, abs=0.01)
    assert 0.25 * len(whole) < len(part) < 0.8 * len(whole)
    sure = len(part) - rate // 10  # the last frame may lack its half
    assert np.abs(part[:sure] - whole[:sure]).max() < 1e-6
    assert capfd.readouterr() == ("", "")


def test_a_vorbis_file_cut_short_is_used() -> None:
    """It has several pages: one whose only page of sound is cut has nothing to decode."""
    content = written("OGG", seconds=20.0, subtype="VORBIS")
    part, (warning,) = read(content[: len(content) // 2])
    assert re.match(r"here: the file is cut short: .* are used\.$", warning)
    whole = read(content)[0]
    assert 2 * RATE < len(part) < 15 * RATE
    assert np.abs(part[:-RATE] - whole[: len(part) - RATE]).max() < 1e-6


def with_id3(text: bytes, content: bytes) -> bytes:
    """Return an MP3 after one more ID3v2 tag, whose only frame, a comment, ends with `text`."""
    comment = b"\0eng\0" + text
    frame = b"COMM" + struct.pack(">IH", len(comment), 0) + comment
    return b"ID3\3\0\0\0\0" + bytes((len(frame) >> 7, len(frame) & 0x7F)) + frame + content


def with_vbri(content: bytes, frames: int) -> bytes:
    """Return an MP3 of MPEG 1 in mono with a VBRI header in place of its Xing header."""
    at = re.search(b"Xing|Info", content).start()  # type: ignore[union-attr]
    start = at - 4 - 17
    vbri = bytes(32) + b"VBRI" + struct.pack(">HHHII", 1, 0, 0, len(content) - start, frames)
    return content[: start + 4] + vbri + content[start + 4 + len(vbri) :]


@pytest.mark.parametrize("text", [b"Info", b"Xing", b"VBRI", b"Info ABCDEFG hello there"])
def test_the_text_of_a_tag_is_no_header_of_an_mp3(text: bytes) -> None:
    content = mpeg()
    content = content[content.index(b"\xff\xfb") :]  # without its own tag
    heard, warnings = read(with_id3(text, content))
    assert warnings == []
    np.testing.assert_array_equal(heard, read(content)[0])


@pytest.mark.parametrize("tags", [0, 1, 2])
def test_an_mp3s_header_is_found_after_its_tags(tags: int) -> None:
    content = mpeg(xing=True)
    content = content[content.index(b"\xff\xfb") :]
    for _ in range(tags):
        content = with_id3(b"Info ABCDEFG hello there", content)
    _, (warning,) = read(content[:-5000])
    assert re.match(r"here: the file is cut short: of 1\.5\d s that its header promises", warning)


def test_joined_files_are_found_after_a_tag_with_a_footer() -> None:
    """ID3 version 2.4: its size counts neither its head nor its footer."""
    tag = b"\4\0\x10\0\0\1\0"
    content = written("WAV") * 2
    heard, warnings = read(b"ID3" + tag + bytes(128) + b"3DI" + tag + content)
    np.testing.assert_array_equal(heard, read(content)[0])
    assert warnings == []


@pytest.mark.parametrize("rate", [44100, 22050, 8000])  # of MPEG 1, 2 and 2.5
@pytest.mark.parametrize("channels", [1, 2])
def test_an_mp3s_first_frame_promises_a_length(rate: int, channels: int) -> None:
    content = mpeg(rate, 64_000, channels, xing=True)
    assert read(content)[1] == []
    _, (warning,) = read(content[: len(content) * 2 // 3])
    assert re.match(r"here: the file is cut short: of 1\.[56]\d s that its header", warning)


def test_an_mp3s_vbri_header_promises_a_length() -> None:
    content = mpeg(xing=True)
    assert read(with_vbri(content, 59))[1] == []  # of 1,152 samples
    _, (warning,) = read(with_vbri(content, 3 * 59))
    assert re.match(r"here: the file is cut short: of 4\.\d\d s that its header", warning)


def test_an_mp3_without_a_packet_promises_no_length() -> None:
    file = io.BytesIO(mpeg(xing=True))
    view = joined.FileView(file, joined.whole(file))
    assert promised_by_frames(view, 1000, 0, 0.0) is None


def test_a_file_whose_packets_are_longer_than_they_say_is_not_cut_short() -> None:
    """Matroska's blocks may say any duration: what is decoded decides."""
    packets = [bytes(640)] * 49 + [bytes(640 * 15)]  # 20 ms each, and the last 300 ms
    for promised_s, said in ((1.28, []), (1.35, []), (1.5, ["of 1.50 s that its header promises"])):
        content = make_matroska(packets, block_ticks=20, seconds=promised_s)
        heard, warnings = read(content)
        assert len(heard) == 1.28 * RATE
        assert [re.findall("of 1.50 s that its header promises", w) for w in warnings] == (
            [said] if said else []
        )


def with_flac_samples(content: bytes, count: int) -> bytes:
    """Return a FLAC file whose header says this number of samples."""
    return content[:22] + struct.pack(">I", count) + content[26:]


@pytest.mark.parametrize("promised_s", [0.5, 1200.0])
def test_a_flac_is_as_long_as_its_packets_whatever_its_header_says(promised_s: float) -> None:
    whole = written("FLAC", seconds=2.0)
    content = with_flac_samples(whole, round(promised_s * RATE))
    warnings: list[str] = []
    source = open_audio({"audio": content}, "here", warnings.append)
    assert source.seconds == pytest.approx(2.0)
    item = {"audio": content}
    heard = load_waveform(item, RATE, "here", limit_s=2.01, warn=warnings.append)
    assert np.array_equal(heard, read(whole)[0])
    assert re.match(r"here: .*promises.* 2\.00 s are there", warnings[-1])
    assert f"{promised_s:.2f} s" in warnings[-1]
    with pytest.raises(PromptTooLongError, match=r"here lasts 2\.000 s, and 1\.900 s"):
        load_waveform(item, RATE, "here", limit_s=1.9)


def test_what_libsndfile_read_of_a_flac_file_cut_short_is_not_read_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sound_file, "BLOCK_NUMBERS", 5000)  # many blocks before the cut
    content = written("FLAC", seconds=4.0)
    whole, part = read(content)[0], read(content[: len(content) // 2])[0]
    assert RATE < len(part) < 3 * RATE
    assert np.array_equal(part, whole[: len(part)])


def test_of_a_flac_file_cut_before_its_first_frame_nothing_is_used() -> None:
    content = written("FLAC")
    for cut in (10, 50, 100):
        with pytest.raises(AudioError, match=r"here: .*(can't be read as|no sound that can be)"):
            read(content[:cut])


def test_packets_that_can_not_be_decoded_are_left_out_and_counted() -> None:
    content = bytearray(make_recording("adts", "aac", seconds=2.0))
    starts = [m.start() for m in re.finditer(rb"\xff\xf1", bytes(content))]
    for at in starts[20:23]:
        content[at + 7 : at + 60] = b"\xff" * 53
    heard, (warning,) = read(bytes(content))
    assert re.search(r"\d of 9\d packets of the file can't be decoded. They are left out", warning)
    assert 1.7 * RATE < len(heard) < 2.05 * RATE


class TestStretch:
    """audio_start and audio_end, in seconds, by the file's own samples."""

    @pytest.mark.parametrize("rate", [RATE, 44100])
    @pytest.mark.parametrize(
        "kind", ["array", "pair", "arriving", "WAV", "FLAC", "OGG", "MP3", "joined"]
    )
    def test_only_what_is_between_is_used(self, kind: str, rate: int) -> None:
        samples = chirp(rate, 2.0)[:, 0]
        given: Any = {
            "array": samples,
            "pair": (samples, rate),
            "arriving": iter(np.split(samples, 10)),
        }.get(kind)
        if given is None:
            one = written("WAV" if kind == "joined" else kind, rate, 2.0)
            given = one * 2 if kind == "joined" else one
        again = chirp(rate, 2.0)[:, 0] if kind == "arriving" else given
        whole = read(again, rate, sampling_rate=rate)[0] if kind != "arriving" else again
        for start, end in ((0.25, 1.5), (0, 0.5), (1.25, None), (0.5, 99), (None, 1)):
            if kind == "arriving":
                given = iter(np.split(samples, 10))
            more = {"audio_start": start, "audio_end": end, "sampling_rate": rate}
            heard, warnings = read(given, rate, **more)
            first = round((start or 0) * rate)
            expected = whole[first : None if end is None else round(end * rate)]
            assert np.array_equal(heard, expected)
            assert warnings == []

    def test_nothing_after_the_end_is_read(self) -> None:
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

    def test_limits_count_the_part_alone(self) -> None:
        content, checked = written("WAV", seconds=3.0), []
        item = {"audio": content, "audio_start": 1.0, "audio_end": 1.5}
        heard = load_waveform(item, RATE, "here", limit_s=0.5, check=checked.append)
        assert len(heard) == RATE // 2
        assert checked == [0.5]

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"audio_start": -1}, "has audio_start -1; it is a number of seconds"),
            ({"audio_start": "1"}, "has audio_start '1'; it is a number of seconds"),
            ({"audio_start": True}, "has audio_start True; it is a number of seconds"),
            ({"audio_end": float("nan")}, "has audio_end nan; it is a number of seconds"),
            ({"audio_end": [2]}, r"has audio_end \[2\]; it is a number of seconds"),
            ({"audio_start": 1, "audio_end": 1}, "audio_end 1 s, and begins at audio_start 1 s"),
            ({"audio_end": 0}, "audio_end 0 s, and begins at audio_start 0 s"),
            ({"audio_start": 2.0}, r"has audio_start 2 s, and lasts 1\.000 s. Give an earlier"),
            ({"audio_start": 0.99}, r"lasts 0\.010 s"),
        ],
    )
    def test_what_is_no_part_is_refused(self, given: dict[str, Any], said: str) -> None:
        pieces = [chirp(RATE, 0.5)[:, 0]] * 2
        for audio in (written("WAV"), np.concatenate(pieces), iter(pieces)):
            with pytest.raises(AudioError, match=f"^here.*{said}"):
                read(audio, sampling_rate=RATE, **given)


def test_without_pyav_only_files_that_need_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {name: make() for name, make in WHOLE.items()}
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    for name, content in contents.items():
        if name in ("flac", "aiff", "au", "w64", "rf64", "wav-of-size-of-all-ones"):
            assert len(read(content)[0]) == RATE
        else:
            with pytest.raises(AudioError, match=r"PyAV.*pip install 'qwen3-omni-neuron\[video\]'"):
                read(content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (make_video, "it has video alone. Send a recording with sound"),
        (lambda: b"\x89PNG\r\n\x1a\n" + bytes(40), "can't be read as audio"),
        (lambda: make_matroska([])[:60], "can't be read as audio"),
        (lambda: b"\xff\xfb" * 900, "can't be read as audio"),
    ],
)
def test_errors_name_the_cause(content: Make, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AudioError, match=f"^here: .*{said}") as refused:
        read(content())
    for words in ("Unspecified", "only nothing", " at 0x", "<none>", "Errno"):
        assert words not in str(refused.value)
    assert capfd.readouterr() == ("", "")
