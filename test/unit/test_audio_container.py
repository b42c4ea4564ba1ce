"""Sound in WebM, Matroska, MP4 and M4A: that of PyAV's decoder, and clear refusals."""

import io
import struct
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import soxr

from qwen3_omni_neuron.errors import AudioError, PromptTooLongError
from qwen3_omni_neuron.prompt.media.audio import load_waveform, open_audio
from testing.made_recordings import FRAGMENTS, make_matroska, make_recording, tone
from testing.made_videos import make_video

RATE = 16000
RECORDINGS: dict[str, Callable[[], bytes]] = {
    "webm-opus": lambda: make_recording("webm", "libopus"),
    "webm-opus-streamed": lambda: make_recording("webm", "libopus", streamed=True),
    "webm-opus-stereo": lambda: make_recording("webm", "libopus", channels=2, streamed=True),
    "webm-vorbis": lambda: make_recording("webm", "vorbis", rate=44100, channels=2),
    "mp4-aac": lambda: make_recording("mp4", "aac", rate=44100),
    "mp4-aac-fragmented": lambda: make_recording("mp4", "aac", options=FRAGMENTS, streamed=True),
    "mp4-opus": lambda: make_recording("mp4", "libopus", channels=2),
    "m4a-aac": lambda: make_recording("ipod", "aac", channels=2),
    "m4a-aac-at-16-khz": lambda: make_recording("ipod", "aac", rate=RATE),
    "matroska-pcm": lambda: make_recording("matroska", "pcm_s16le", rate=22050),
    "matroska-compressed": lambda: make_matroska([QUIET] * 50, packed=True),
    "with-video": lambda: make_video(container="mp4", audio="aac"),
    "mov": lambda: make_recording("mov", "aac"),
}
QUIET = np.arange(-160, 160, dtype="<i2").tobytes()  # 20 ms


def load(content: bytes | Path, limit_s: float = 60.0) -> np.ndarray:
    return load_waveform({"audio": content}, RATE, "here", limit_s)


def by_pyav(content: bytes) -> np.ndarray:
    """Return the mono samples at RATE: of PyAV's decoder, and resampled at once."""
    parts = []
    with av.open(io.BytesIO(content)) as container:
        for frame in container.decode(audio=0):
            samples = frame.to_ndarray()
            if frame.format.name == "s16":
                samples = samples.reshape(-1, len(frame.layout.channels)).T / np.float32(32768)
            parts.append(samples.astype(np.float32))
        mono = np.ascontiguousarray(np.concatenate(parts, axis=1).T).mean(axis=1)
        return soxr.resample(mono, frame.sample_rate, RATE)


@pytest.mark.parametrize("name", RECORDINGS)
def test_samples_are_those_of_pyavs_decoder(tmp_path: Path, name: str) -> None:
    content = RECORDINGS[name]()
    file = tmp_path / "recording"
    file.write_bytes(content)
    expected = by_pyav(content)
    assert len(expected) == pytest.approx(RATE, rel=0.05)
    assert np.abs(expected).max() > 0.002
    assert np.array_equal(load(content), expected)
    assert np.array_equal(load(file), expected)


@pytest.mark.parametrize("form", ["webm", "mp4"])
def test_what_a_codec_adds_at_the_beginning_is_left_out(form: str) -> None:
    """Opus begins with 312 samples that are no sound, which its container says."""
    heard = load(make_recording(form, "libopus", seconds=2.0))
    assert len(heard) == pytest.approx(2 * RATE, abs=400)
    middle = slice(RATE // 2, RATE)
    assert np.abs(heard[middle] - tone(RATE, 2.0)[0][middle]).max() < 0.05


def test_a_recording_without_a_length_is_measured_before_it_is_decoded() -> None:
    content = make_recording("webm", "libopus", seconds=3.0, streamed=True)
    with av.open(io.BytesIO(content)) as container:
        assert container.duration is None
    source = open_audio({"audio": content}, "here")
    assert source.rate == 48000
    assert source.seconds == pytest.approx(3.0, abs=0.03)
    with pytest.raises(PromptTooLongError, match=r"^here lasts 3\.0\d\d s, and 2\.000 s"):
        load(content, limit_s=2.0)


def with_durations_of(content: bytes, ticks: int) -> bytes:
    """Return an MP4 whose table says that every packet lasts `ticks`."""
    table = content.index(b"stts") + 8
    (entries,) = struct.unpack_from(">I", content, table)
    changed = bytearray(content)
    for entry in range(entries):
        struct.pack_into(">I", changed, table + 8 + 8 * entry, ticks)
    return bytes(changed)


def with_many_packets(content: bytes) -> bytes:
    """Return an MP4 whose table says that it has 2 ** 31 packets of one byte."""
    table = content.index(b"stsz") + 8
    changed = bytearray(content)
    struct.pack_into(">II", changed, table, 1, 2**31)
    return bytes(changed)


@pytest.mark.parametrize(
    "content",
    [
        lambda: with_durations_of(aac(), 100),
        lambda: make_matroska([bytes(64_000)] * 4, block_ticks=1),
    ],
)
def test_a_file_that_is_longer_than_it_says_is_checked_as_it_grows(
    content: Callable[[], bytes],
) -> None:
    checked: list[float] = []
    heard = load_waveform({"audio": content()}, RATE, "here", check=checked.append)
    assert len(heard) > 3.8 * RATE
    assert len(checked) > 1
    assert checked[0] < 1
    assert 3.8 < checked[-1] <= len(heard) / RATE + 0.1
    with pytest.raises(PromptTooLongError, match=r"or more, and 2\.000 s"):
        load(content(), limit_s=2.0)


def aac(**options: str) -> bytes:
    return make_recording("mp4", "aac", seconds=4.0, options=options)


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "only-video": (make_video, "it has video alone. Send a recording with sound"),
    "only-video-in-webm": (
        lambda: make_video(container="webm", codec="libvpx"),
        "it has video alone",
    ),
    "no-streams": (lambda: make_matroska([])[:60], "can't be read as audio"),
    "no-packets": (lambda: make_matroska([]), "can't be read as audio.*End of file"),
    "header-alone": (lambda: aac()[:200], "can't be read as audio.*cut short"),
    "without-its-index": (lambda: aac()[:-500], "can't be read as audio.*cut short"),
    "no-decoder": (lambda: make_matroska([QUIET], codec="A_NONE"), "no decoder"),
    "without-its-codecs-header": (
        lambda: make_matroska([QUIET] * 9, codec="A_VORBIS"),
        "has no sound that can be decoded",
    ),
    "rate-of-1-hz": (lambda: make_matroska([QUIET], rate=1), "sampling_rate of 1 Hz"),
    "shorter-than-a-frame": (lambda: make_matroska([QUIET]), "lasts 0.020 s"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_recording_is_refused(name: str) -> None:
    make, said = BAD[name]
    with pytest.raises(AudioError, match=f"^here.*({said})") as refused:
        load(make())
    assert " at 0x" not in str(refused.value)


def test_a_small_file_of_hours_is_refused_before_it_is_decoded() -> None:
    """Zlib makes a thousand bytes of one: 200 kB become 94 minutes."""
    content = make_matroska([bytes(9_000_000)] * 20, packed=True)
    assert len(content) < 200_000
    with pytest.raises(PromptTooLongError, match=r"lasts 5625\.000 s"):
        load(content)


def test_a_table_of_more_packets_than_the_file_has_is_refused() -> None:
    with pytest.raises(AudioError, match=r"^here: .* has no sound that can be decoded"):
        load(with_many_packets(aac()))


def test_without_pyav_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(AudioError, match=r"^here is sound.*qwen3-omni-neuron\[video\]'; or send"):
        load(make_matroska([QUIET] * 9))
