"""Decoding in processes apart: what comes of a file is what the API makes of it, and every harm
that a file does stays in its process.
"""

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import soundfile
import uvloop
from PIL import Image

from qwen3_omni_neuron.engines.process.nameless_file import nameless_file
from qwen3_omni_neuron.errors import (
    AudioError,
    ClosedError,
    ImageError,
    InputError,
    OptionError,
    PromptTooLongError,
    VideoError,
)
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.media.settings import MediaSettings
from qwen3_omni_neuron.prompt.media.sizes import Sizes
from qwen3_omni_neuron.prompt.media.video import VideoHeader
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.prompt.template import Conversation
from qwen3_omni_neuron.serving.decoding import pcm, wire, work
from qwen3_omni_neuron.serving.decoding.job import MIB, Admit, Decoded, Job, Measured, PoolSettings
from qwen3_omni_neuron.serving.decoding.job import admit_all as admitted
from qwen3_omni_neuron.serving.decoding.link import ForkServer
from qwen3_omni_neuron.serving.decoding.pcm import decode_inline
from qwen3_omni_neuron.serving.decoding.pool import DecodingPool
from qwen3_omni_neuron.serving.decoding.turns import Turns
from qwen3_omni_neuron.serving.sound import pcm16, wav_header
from testing.decoding_faults import MODULE, fault, says
from testing.made_videos import make_video
from testing.media_cases import QUESTION_WAV, noise_image, tone, user
from testing.subprocesses import children, lives, open_files

LONG_S = 60.0  # for what takes a moment, on a machine that does other things
MEDIA = MediaSettings(16000, 12.5, Sizes(16, 2, 2, 3136, 12_845_056))
ORIENTATION = 0x0112
Result = TypeVar("Result")


def sound(form: str, subtype: str, rate: int = 16000, channels: int = 1, s: float = 1.3) -> bytes:
    noise = np.random.default_rng(rate).standard_normal((round(s * rate), channels)) / 10
    file = io.BytesIO()
    soundfile.write(file, noise, rate, format=form, subtype=subtype)
    return file.getvalue()


def wav_of_infinity() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.full(16000, np.inf), 16000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def picture(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    (image or noise_image(150, 100)).save(file, kind, **options)
    return file.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return picture("JPEG", exif=exif)


def grey_video(n: int, width: int, height: int) -> bytes:
    """Return a video of grey frames, a MPEG-4 of 30 frames a second."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream: Any = out.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        frame = av.VideoFrame(width, height, "yuv420p")
        for plane in frame.planes:
            plane.update(bytes([100]) * plane.buffer_size)
        for index in range(n):
            frame.pts = index
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


def without_length() -> bytes:
    """Return an MP3 without the frame that has its length, which is guessed too short."""
    loud = np.random.default_rng(0).standard_normal(8000) / 3
    file = io.BytesIO()
    samples = np.concatenate([loud, np.zeros(80_000)])
    soundfile.write(file, samples, 16000, format="MP3", subtype="MPEG_LAYER_III")
    assert b"Xing" in file.getvalue()[:288]
    return file.getvalue()[288:]


def heard_longer_than_seen() -> bytes:
    """Return a video of 1 s with 2.5 s of sound, in a format that does not say how long it is."""
    return make_video(container="matroska", audio="aac", audio_s=2.5)


def job_of(kind: Any, content: bytes, **fields: Any) -> Job:
    return Job(kind, content, "here", fields.pop("media", MEDIA), **fields)


def wait_until(condition: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + LONG_S
    while not (value := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return value


def children_of(pool: DecodingPool) -> list[int]:
    return [] if pool.pid is None else children(pool.pid)


async def until(condition: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + LONG_S
    while not (value := condition()):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    return value


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine in an event loop of either kind."""

    def run_in_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(coroutine, 3 * LONG_S)

        return (uvloop.run if request.param == "uvloop" else asyncio.run)(bounded())

    return run_in_loop


class Shared:
    """A pool whose event loop runs in a thread, for tests that only ask for results."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        settings = PoolSettings(memory_bytes=512 * MIB, deadline_s=LONG_S)
        self._pool = DecodingPool(settings, MODULE)

    def decode(self, job: Job, admit: Admit = admitted) -> Decoded:
        return self.do(self._pool.decode("owner", job, admit))

    def do(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(3 * LONG_S)

    def close(self) -> None:
        self.do(self._pool.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    pool = Shared()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def conversation(checkpoint: Path, config: OmniConfig) -> Conversation:
    return Conversation(checkpoint, config)


def assert_equal(prompt: Prompt, expected: Prompt) -> None:
    assert prompt.token_ids.equal(expected.token_ids)
    assert prompt.positions.equal(expected.positions)
    assert prompt.talker.positions.equal(expected.talker.positions)
    assert len(prompt.audio_mel) == len(expected.audio_mel)
    assert all(map(np.array_equal, prompt.audio_mel, expected.audio_mel))
    for given, wanted in ((prompt.images, expected.images), (prompt.videos, expected.videos)):
        assert [p.grid for p in given] == [p.grid for p in wanted]
        assert all(np.array_equal(p.pixels, w.pixels) for p, w in zip(given, wanted, strict=True))
    assert (prompt.audio_tokens, prompt.image_tokens) == (
        expected.audio_tokens,
        expected.image_tokens,
    )


AUDIO = {
    "wav": lambda: sound("WAV", "PCM_16"),
    "question": QUESTION_WAV.read_bytes,
    "wav-8-bit": lambda: sound("WAV", "PCM_U8", 8000),
    "wav-24-bit-stereo": lambda: sound("WAV", "PCM_24", 44100, 2),
    "wav-float": lambda: sound("WAV", "FLOAT", 48000, 6),
    "wav-of-mu-law": lambda: sound("WAV", "ULAW", 8000),
    "flac": lambda: sound("FLAC", "PCM_16", 22050),
    "flac-stereo": lambda: sound("FLAC", "PCM_24", 96000, 2),
    "mp3": lambda: sound("MP3", "MPEG_LAYER_III", 24000),
    "mp3-of-guessed-length": without_length,
    "ogg": lambda: sound("OGG", "VORBIS", 44100, 2),
    "opus": lambda: sound("OGG", "OPUS", 48000),
    "aiff": lambda: sound("AIFF", "PCM_16", 11025),
    "just-long-enough": lambda: sound("FLAC", "PCM_16", 44100, s=0.03),
}
IMAGES: dict[str, tuple[Callable[[], bytes], dict[str, Any]]] = {
    "png": (lambda: picture("PNG"), {}),
    "jpeg": (lambda: picture("JPEG"), {}),
    "webp": (lambda: picture("WEBP"), {}),
    "gif": (lambda: picture("GIF"), {}),
    "bmp": (lambda: picture("BMP"), {}),
    "tiff": (lambda: picture("TIFF", compression="tiff_lzw"), {}),
    "rotated": (rotated, {}),
    "clear": (lambda: picture("PNG", noise_image(90, 70).convert("RGBA").rotate(9)), {}),
    "grey-16": (
        lambda: picture("PNG", Image.fromarray(np.arange(4200, dtype=np.uint16).reshape(60, 70))),
        {},
    ),
    "palette": (lambda: picture("PNG", noise_image(90, 70).quantize(40)), {}),
    "cmyk": (lambda: picture("JPEG", noise_image(90, 70).convert("CMYK")), {}),
    "enlarged": (lambda: picture("PNG"), {"min_pixels": 90_000}),
    "shrunk": (lambda: picture("PNG"), {"max_pixels": 5_000}),
    "size-kept": (lambda: picture("PNG"), {"min_pixels": 1, "max_pixels": 2**70}),
    "tiny": (lambda: picture("PNG", noise_image(1, 1)), {}),
    "narrow": (lambda: picture("PNG", noise_image(1, 200)), {}),
    # 9000 x 45 pixels become 281 x 1 tokens, and 281 is more than 200.
    "narrow-and-fitted-narrower": (lambda: picture("PNG", noise_image(9000, 45)), {}),
}
VIDEOS: dict[str, tuple[Callable[[], bytes], dict[str, Any]]] = {
    "mp4": (make_video, {}),
    "heard": (lambda: make_video(audio="aac"), {}),
    "heard-late": (lambda: make_video(audio="aac", audio_late_s=0.4), {}),
    "heard-longer-than-said": (heard_longer_than_seen, {}),
    "heard-longer": (lambda: make_video(audio="aac", audio_s=2.5), {}),
    "mkv": (lambda: make_video(container="matroska", audio="ac3"), {"fps": 5.0}),
    "avi": (lambda: make_video(container="avi", codec="libx264", b_frames=2), {"fps": 7}),
    "webm": (lambda: make_video(container="webm", codec="libvpx", rate=15), {"max_frames": 6}),
    "mpeg-ts": (lambda: make_video(container="mpegts", codec="mpeg2video"), {"fps": 30}),
    "uneven": (lambda: make_video(5, times_ms=[0, 40, 700, 710, 1500]), {}),
    "rotated": (lambda: make_video(rotation=90), {"min_pixels": 1024}),
    "shrunk": (make_video, {"max_pixels": 1024, "fps": 10.0}),
    "narrow": (lambda: grey_video(4, 2000, 10), {"min_pixels": 1024}),
}


@pytest.mark.parametrize("name", AUDIO)
def test_a_decoded_sound_gives_the_prompt_of_its_file(
    shared: Shared, conversation: Conversation, name: str
) -> None:
    content = AUDIO[name]()
    job = job_of("audio", content, media=conversation.media_settings)
    decoded = shared.decode(job)
    expected = conversation.prompt([user({"type": "audio", "audio": content})])
    assert_equal(conversation.prompt([user(decoded.item)]), expected)
    assert decoded.item["audio"].dtype == np.float32
    assert decoded.measured.size == decoded.item["audio"].nbytes


@pytest.mark.parametrize("name", IMAGES)
def test_a_decoded_image_gives_the_prompt_of_its_file(
    shared: Shared, conversation: Conversation, name: str
) -> None:
    make, options = IMAGES[name]
    content = make()
    job = job_of("image", content, media=conversation.media_settings, options=options)
    sizes: list[Measured] = []
    decoded = shared.decode(job, sizes.append)
    expected = conversation.prompt([user({"type": "image", "image": content, **options})])
    assert_equal(conversation.prompt([user(decoded.item)]), expected)
    assert sizes == [decoded.measured]
    assert decoded.measured.size == decoded.item["image"].nbytes


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("name", VIDEOS)
def test_a_decoded_video_gives_the_prompt_of_its_file(
    shared: Shared, conversation: Conversation, name: str, heard: bool
) -> None:
    make, options = VIDEOS[name]
    content = make()
    media = conversation.media_settings
    job = job_of("video", content, media=media, options=options, use_audio_in_video=heard)
    decoded = shared.decode(job)
    file = {"type": "video", "video": content, **options}
    expected = conversation.prompt([user(file)], use_audio_in_video=heard)
    assert_equal(conversation.prompt([user(decoded.item)], use_audio_in_video=heard), expected)


REFUSED: dict[str, tuple[str, Callable[[], bytes], dict[str, Any]]] = {
    "no-sound": ("audio", lambda: b"hello", {}),
    "empty": ("audio", lambda: b"", {}),
    "short-sound": ("audio", lambda: sound("FLAC", "PCM_16", s=0.01), {}),
    "cut-flac": ("audio", lambda: sound("FLAC", "PCM_16")[:9000], {}),
    "infinite": ("audio", wav_of_infinity, {}),
    "no-image": ("image", lambda: b"hello", {}),
    "ico": ("image", lambda: picture("ICO"), {}),
    "cut-png": ("image", lambda: picture("PNG")[:5000], {}),
    "too-narrow": ("image", lambda: picture("PNG", noise_image(201, 1)), {}),
    "no-such-limit": ("image", lambda: picture("PNG"), {"max_pixels": "many"}),
    "contradiction": ("image", lambda: picture("PNG"), {"max_pixels": 5, "min_pixels": 9}),
    "no-video": ("video", lambda: b"hello", {}),
    "cut-mp4": ("video", lambda: make_video()[: len(make_video()) // 2], {}),
    "song": ("video", lambda: make_video(video=False, audio="aac"), {}),
    "no-rate": ("video", make_video, {"fps": 0}),
    "no-decoder": ("video", lambda: make_video(codec="libx264").replace(b"avc1", b"zzzz"), {}),
    "too-narrow-video": ("video", lambda: grey_video(4, 2010, 10), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_as_the_api_refuses_it(
    shared: Shared, conversation: Conversation, name: str
) -> None:
    kind, make, options = REFUSED[name]
    content = make()
    load = conversation.loader(False, None)
    with pytest.raises(InputError) as expected:
        load(kind, {kind: content, **options}, "here")
    with pytest.raises(InputError) as found:
        shared.decode(job_of(kind, content, media=conversation.media_settings, options=options))
    addresses = re.compile("0x[0-9a-f]+")  # of Python's objects, in libsndfile's messages
    assert found.type is expected.type
    assert addresses.sub("", str(found.value)) == addresses.sub("", str(expected.value))


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_a_file_of_too_many_tokens_is_refused_as_the_api_refuses_it(
    shared: Shared, conversation: Conversation, kind: str
) -> None:
    content = {
        "audio": lambda: sound("FLAC", "PCM_16", s=4),
        "image": lambda: picture("PNG", noise_image(600, 400)),
        "video": make_video,
    }[kind]()
    with pytest.raises(PromptTooLongError) as expected:
        conversation.loader(False, 20)(kind, {kind: content}, "here")
    job = job_of(kind, content, media=conversation.media_settings, most_tokens=20)
    with pytest.raises(PromptTooLongError) as found:
        shared.decode(job)
    assert str(found.value) == str(expected.value)


def test_sound_of_a_video_that_is_too_long_is_refused_while_it_is_decoded(
    shared: Shared, conversation: Conversation
) -> None:
    content = make_video(audio="aac", audio_s=9)
    expected = "^here \\(its audio\\) lasts longer, and"
    with pytest.raises(PromptTooLongError, match=expected):
        conversation.loader(True, 90)("video", {"video": content, "max_pixels": 1024}, "here")
    fields = {"most_tokens": 90, "use_audio_in_video": True, "options": {"max_pixels": 1024}}
    with pytest.raises(PromptTooLongError, match=expected):
        shared.decode(job_of("video", content, media=conversation.media_settings, **fields))


@pytest.mark.parametrize(
    ("kind", "content", "limits", "error", "said"),
    [
        (
            "audio",
            lambda: sound("FLAC", "PCM_16", s=4),
            {"most_s": 3},
            AudioError,
            "4.0 s, and 3 s",
        ),
        ("image", lambda: picture("PNG"), {"most_pixels": 14_999}, ImageError, "15000 pixels"),
        ("video", make_video, {"most_s": 0.9}, VideoError, "1.0 s, and 0.9 s"),
        ("video", make_video, {"most_pixels": 3071}, VideoError, "3072 pixels"),
    ],
)
def test_limits_of_a_job(
    shared: Shared,
    kind: str,
    content: Callable[[], bytes],
    limits: dict[str, Any],
    error: type[InputError],
    said: str,
) -> None:
    with pytest.raises(error, match=f"^here .*{said}"):
        shared.decode(job_of(kind, content(), **limits))


class RefusedError(Exception):
    """A refusal by the caller's budget."""


def refuse(measured: Measured) -> None:
    raise RefusedError(measured)


@pytest.mark.parametrize(
    ("job", "measured"),
    [
        # 600 s of silence: 1 kB that becomes 38 MB.
        (
            lambda: job_of("audio", flac_of_silence(600)),
            Measured(600.0, 0, 38_400_000),
        ),
        (
            lambda: job_of("image", picture("PNG", Image.new("1", (4096, 4096)))),
            Measured(0.0, 4096 * 4096, 3 * 3584 * 3584),
        ),
        (
            lambda: job_of("video", make_video(audio="aac"), use_audio_in_video=True),
            Measured(1.021678, 48 * 64, 4 * 3 * 320 * 448 + 4 * 16347),
        ),
    ],
)
def test_the_budget_is_asked_before_anything_is_decoded(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, job: Callable[[], Job], measured: Measured
) -> None:
    with pytest.raises(RefusedError) as refused:
        shared.decode(job(), refuse)
    (asked,) = refused.value.args
    assert asked.seconds == pytest.approx(measured.seconds, abs=0.03)
    assert asked == replace(measured, seconds=asked.seconds, size=asked.size)
    assert asked.size == pytest.approx(measured.size, rel=0.03)


def flac_of_silence(seconds: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(16000 * seconds, np.int16), 16000, format="FLAC")
    return file.getvalue()


def test_the_budget_is_asked_again_where_a_file_is_longer_than_it_said(shared: Shared) -> None:
    job = job_of("video", heard_longer_than_seen(), use_audio_in_video=True)
    sizes: list[Measured] = []
    decoded = shared.decode(job, sizes.append)
    first, second = sizes
    assert first.size < second.size == decoded.measured.size
    assert second.seconds == pytest.approx(2.5, abs=0.1)

    def refuse_the_second(measured: Measured) -> None:
        if measured.size > first.size:
            raise RefusedError

    with pytest.raises(RefusedError):
        shared.decode(job, refuse_the_second)


def test_a_frame_larger_than_the_header_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, check: Any, fit: Any, **__: Any) -> None:
        check(VideoHeader(4, 64, 64, 1.0, 0.0))
        fit(np.zeros((64, 64, 3), np.uint8))
        fit(np.zeros((400, 400, 3), np.uint8))

    monkeypatch.setattr(work, "load_video", load)
    with pytest.raises(VideoError, match=r"^here has 160000 pixels, and 9999 is the most"):
        work.decode(job_of("video", b"", most_pixels=9999), admitted)


def test_frames_are_made_small_while_they_are_decoded(shared: Shared) -> None:
    """In their own size they would take 1.5 GB, of the 512 MiB that a decoder has here."""
    options = {"fps": 30.0, "max_pixels": 32 * 32}
    decoded = shared.decode(job_of("video", grey_video(240, 1920, 1080), options=options))
    assert decoded.item["video"].shape == (240, 32, 32, 3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (fault("signal", number=int(signal.SIGSEGV)), "its decoder was ended by SIGSEGV"),
        (fault("signal", number=int(signal.SIGKILL)), "its decoder was ended by SIGKILL"),
        (fault("signal", number=int(signal.SIGXCPU)), "more than 120 s of processors' time"),
        (fault("memory", size=1 << 40), "more than 512 MiB of memory"),
        (fault("memory", size=600 * MIB), "more than 512 MiB of memory"),
        (fault("no such"), "its decoder ended with exit status 1"),
        (says(), "its decoder ended with exit status 0"),
        (says({"measured": [1.0, 0, 64000]}), "its decoder ended with exit status 0"),
    ],
)
@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_what_a_codec_does_to_itself_ends_its_item_alone(
    shared: Shared, kind: str, wrong: bytes, said: str
) -> None:
    error = {"audio": AudioError, "image": ImageError, "video": VideoError}[kind]
    advice = r"\. Send it in another format, or smaller\.$"
    with pytest.raises(error, match=f"^here can't be decoded: .*{said}.*{advice}"):
        shared.decode(job_of(kind, wrong))
    assert shared.decode(job_of("audio", sound("FLAC", "PCM_16"))).measured.seconds == 1.3


@pytest.mark.parametrize(
    "content",
    [
        lambda: picture("PNG", Image.new("L", (16384, 16384)).convert("1")),
        lambda: picture("TIFF", Image.new("1", (16384, 8192)), compression="group4"),
    ],
    ids=["png", "tiff"],
)
def test_a_bomb_gets_no_more_memory_than_a_decoder_may_have(
    shared: Shared, content: Callable[[], bytes]
) -> None:
    said = "more than 512 MiB of memory|is too large"
    with pytest.raises(ImageError, match=f"^here.*({said})"):
        shared.decode(job_of("image", content()))


HOLDS = vars(wire.Holding(samples=16000))
MEASURED = {"measured": [1.0, 0, 64000]}
PICTURE = vars(wire.Holding(1, 32, 32))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("audio", ["hello, this is no length"]),
        ("audio", [wire.packed({}).decode()]),
        ("audio", ["\x01\x00\x00\x00{"]),
        ("audio", ["\x07\x00\x00\x00[1,2,3]"]),
        ("audio", ["\x7f\x7f\x00\x00" + "[" * 0x7F7F]),
        ("audio", [{"measured": 1, "error": 2}]),
        ("audio", [{"holds": HOLDS}]),
        ("audio", [{"measured": [1.0, 0]}]),
        ("audio", [{"measured": [True, 0, 1]}]),
        ("audio", [{"measured": [1.0, 0, -1]}]),
        ("audio", [{"measured": [1.0, 0, 1.5]}]),
        ("audio", [{"measured": [1.0, 0, 10**400]}]),
        ("audio", ['\x1b\x00\x00\x00{"measured": [1e999, 0, 1]}']),
        ("audio", ['\x19\x00\x00\x00{"measured": [NaN, 0, 1]}']),
        ("audio", [{"error": ["SystemExit", "no"]}]),
        ("audio", [{"error": ["AudioError"]}]),
        ("audio", [{"error": "AudioError"}]),
        ("audio", [MEASURED, {"holds": {}}]),
        ("audio", [MEASURED, {"holds": [1]}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"samples": 1 << 40}}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"samples": -1}}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"samples": 0}}]),
        ("audio", [MEASURED, {"holds": HOLDS | {"dtype": "object"}}]),
        ("audio", [MEASURED, {"holds": PICTURE}]),
        ("image", [MEASURED, {"holds": HOLDS}]),
        ("image", [MEASURED, {"holds": PICTURE | {"frames": 2}}]),
        ("image", [MEASURED, {"holds": PICTURE | {"height": 1 << 30, "width": 1 << 30}}]),
        ("image", [MEASURED, {"holds": PICTURE | {"width": 0}}]),
        ("image", [MEASURED, {"holds": PICTURE | {"fitted": 1}}]),
        ("video", [MEASURED, {"holds": PICTURE}]),
        ("video", [MEASURED, {"holds": PICTURE | {"fps": "2"}}]),
    ],
)
def test_answers_that_no_decoder_of_ours_gives_are_refused(
    shared: Shared, kind: str, said: list[Any]
) -> None:
    with pytest.raises(InputError, match=r"^here can't be decoded: its decoder gave no proper"):
        shared.decode(job_of(kind, says(*said)))


def test_a_result_of_a_process_that_crashes_while_it_writes_is_refused(shared: Shared) -> None:
    content = says(MEASURED, {"holds": HOLDS}, status=7)
    with pytest.raises(AudioError, match="its decoder ended with exit status 7"):
        shared.decode(job_of("audio", content))


def test_a_result_that_its_process_cuts_short_is_refused(shared: Shared) -> None:
    with pytest.raises(AudioError, match="its decoder gave no proper answer"):
        shared.decode(job_of("audio", fault("cut")))


def test_a_child_that_says_much_and_waits_for_nothing_is_refused(shared: Shared) -> None:
    with pytest.raises(AudioError, match="can't be decoded"):
        shared.decode(job_of("audio", says("\xff" * (1 << 22), go_on=False)))


def test_a_message_of_a_child_is_bounded_and_has_no_control_characters(shared: Shared) -> None:
    error = {"error": ["AudioError", "bad \x1b[31m" + "x" * 9000]}
    with pytest.raises(AudioError) as found:
        shared.decode(job_of("audio", says(error)))
    assert str(found.value).startswith("bad \\x1b[31mxxx")
    assert len(str(found.value)) < 2100


def test_a_child_has_limits_and_no_more_than_it_needs(shared: Shared) -> None:
    with pytest.raises(AudioError) as found:
        shared.decode(job_of("audio", fault("report")))
    state = json.loads(str(found.value))
    limits = state["limits"]
    assert not state["torch"]
    assert (state["threads"], state["nice"] - os.nice(0), state["ignored"]) == (1, 5, False)
    assert state["files"] == 6  # of the standard streams, its connection, content and result
    assert limits["AS"] <= state["mapped"] + 512 * MIB
    del limits["AS"]
    assert limits == {"CPU": 120, "CORE": 0, "FSIZE": MIB, "NOFILE": 64}


def test_the_fork_server_is_small_and_has_one_thread(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> None:
    async def main() -> str:
        pool = DecodingPool()
        pool.start()
        await pool.decode("a", job_of("audio", sound("FLAC", "PCM_16")))
        open_then = open_files(pool.pid)
        for _ in range(3):
            await pool.decode("a", job_of("audio", sound("FLAC", "PCM_16")))
        assert open_files(pool.pid) == open_then
        status = Path(f"/proc/{pool.pid}/status").read_text()
        mapped = Path(f"/proc/{pool.pid}/maps").read_text()
        await pool.close()
        assert "torch" not in mapped
        return status

    status = dict(line.split(":", 1) for line in run(main()).splitlines())
    assert int(status["Threads"]) == 1
    assert int(status["VmRSS"].split()[0]) < 100_000


def test_a_job_that_takes_too_long_is_ended(run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    async def main() -> None:
        pool = DecodingPool(PoolSettings(deadline_s=0.5), MODULE)
        for wrong in (fault("sleep"), fault("busy"), fault("deaf")):
            with pytest.raises(VideoError, match=r"its decoder needed more than 0\.5 s"):
                await pool.decode("a", job_of("video", wrong))
            await until(lambda: not children_of(pool))
        await pool.close()

    run(main())


def test_processors_time_is_limited(run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    async def main() -> int | None:
        server = ForkServer(MODULE)
        ours, theirs = socket.socketpair()
        with ours, theirs, nameless_file() as content, nameless_file() as result:
            content.write(fault("busy"))
            ours.sendall(wire.packed({}))
            files = (theirs.fileno(), content.fileno(), result.fileno())
            status = await server.fork(1, 512 * MIB, 1, files)
        await server.close()
        return status

    assert run(main()) == -signal.SIGXCPU


def test_a_job_of_one_owner_does_not_wait_for_those_of_another(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> None:
    """Four sounds of 8 channels at 655 kHz, which take minutes, and a question."""
    wide = io.BytesIO()
    with soundfile.SoundFile(wide, "w", 655_350, 8, "PCM_16", format="FLAC") as file:
        for _ in range(60):
            file.write(np.zeros((655_350, 8), np.int16))

    async def main() -> None:
        pool = DecodingPool(PoolSettings(decoders=2, deadline_s=3600.0), MODULE)
        held = [
            asyncio.create_task(pool.decode("bad", job_of("audio", wide.getvalue())))
            for _ in range(4)
        ]
        await until(lambda: children_of(pool))
        for _ in range(3):
            decoded = await pool.decode("good", job_of("audio", sound("FLAC", "PCM_16")))
            assert decoded.measured.seconds == 1.3
        assert len(children_of(pool)) == 1
        assert not any(task.done() for task in held)
        for task in held:
            task.cancel()
        await asyncio.wait(held)
        await until(lambda: not children_of(pool))
        await pool.close()

    run(main())


def test_a_cancelled_job_is_killed_at_once_and_the_next_begins(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> None:
    async def main() -> None:
        pool = DecodingPool(PoolSettings(decoders=1, deadline_s=3600.0), MODULE)
        first = asyncio.create_task(pool.decode("a", job_of("audio", fault("sleep"))))
        second = asyncio.create_task(pool.decode("a", job_of("audio", fault("sleep"))))
        third = asyncio.create_task(pool.decode("b", job_of("audio", sound("FLAC", "PCM_16"))))
        (child,) = await until(lambda: children_of(pool))
        second.cancel()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(asyncio.CancelledError):
            await second
        assert (await third).measured.seconds == 1.3
        assert not lives(child)
        await pool.close()

    run(main())


def test_a_task_may_be_cancelled_at_any_moment(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> None:
    """After every number of steps of the event loop; the place is free each time."""

    async def main() -> None:
        pool = DecodingPool(PoolSettings(decoders=1), MODULE)
        job = job_of("image", picture("PNG"))
        await pool.decode("a", job)
        files = open_files()
        for steps in (*range(12), *range(12, 400, 20)):
            task = asyncio.create_task(pool.decode("a", job))
            for _ in range(steps):
                await asyncio.sleep(0)
            if steps % 3 == 0:
                await asyncio.sleep(0.001 * steps / 20)
            task.cancel()
            await asyncio.wait([task])
        await asyncio.wait_for(pool.decode("b", job), LONG_S)
        await until(lambda: not children_of(pool))
        assert open_files() == files
        await pool.close()

    run(main())


def test_a_fork_server_that_was_killed_is_started_anew(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> None:
    async def main() -> None:
        pool = DecodingPool(PoolSettings(decoders=3, deadline_s=3600.0), MODULE)
        job = job_of("audio", sound("FLAC", "PCM_16"))
        await pool.decode("a", job)
        assert pool.pid is not None
        first = pool.pid
        os.kill(first, signal.SIGKILL)
        assert (await pool.decode("a", job)).measured.seconds == 1.3
        assert pool.pid != first
        # While a job runs: it is done again, once, and its child does not stay.
        held = asyncio.create_task(pool.decode("a", job_of("audio", fault("sleep"))))
        for _ in range(2):
            (child,) = await until(lambda: children_of(pool))
            os.kill(pool.pid, signal.SIGKILL)
            await until(lambda: not lives(child))  # noqa: B023, it is awaited here
        with pytest.raises(AudioError, match="the process that starts decoders was ended"):
            await held
        assert (await pool.decode("a", job)).measured.seconds == 1.3
        await pool.close()

    run(main())


def test_a_fork_server_that_does_nothing_is_replaced(
    run: Callable[[Coroutine[Any, Any, Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen3_omni_neuron.serving.decoding.pool.KILL_S", 0.3)

    async def main() -> None:
        pool = DecodingPool(PoolSettings(deadline_s=0.5), MODULE)
        pool.start()
        assert pool.pid is not None
        os.kill(pool.pid, signal.SIGSTOP)
        stopped = pool.pid
        with pytest.raises(AudioError):
            await pool.decode("a", job_of("audio", fault("sleep")))
        assert pool.pid != stopped
        await until(lambda: not lives(stopped))
        await pool.close()

    run(main())


def test_a_fork_server_that_cannot_start_is_no_endless_wait(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> None:
    async def main() -> None:
        pool = DecodingPool(server="no_such_module")
        with pytest.raises(AudioError, match="the process that starts decoders was ended"):
            await pool.decode("a", job_of("audio", sound("FLAC", "PCM_16")))
        await pool.close()

    run(main())


def test_close_ends_all_and_leaves_nothing(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> None:
    async def main() -> None:
        threads, files = threading.active_count(), open_files()
        before = children(os.getpid())
        pool = DecodingPool(PoolSettings(decoders=2, deadline_s=3600.0), MODULE)
        jobs = [
            asyncio.create_task(pool.decode(owner, job_of("audio", fault("sleep"))))
            for owner in "abc"
        ]
        held = await until(lambda: len(c := children_of(pool)) == 2 and c)
        server = pool.pid
        await pool.close()
        for job in jobs:
            with pytest.raises(ClosedError):
                await job
        with pytest.raises(ClosedError):
            await pool.decode("a", job_of("audio", sound("FLAC", "PCM_16")))
        with pytest.raises(ClosedError):
            pool.start()
        await pool.close()
        assert not any(map(lives, (*held, server)))
        assert children(os.getpid()) == before
        assert open_files() == files
        assert threading.active_count() == threads

    run(main())


def test_all_ends_with_a_parent_that_is_killed() -> None:
    script = (
        "import asyncio\n"
        "from qwen3_omni_neuron.prompt.media.settings import MediaSettings\n"
        "from qwen3_omni_neuron.prompt.media.sizes import Sizes\n"
        "from qwen3_omni_neuron.serving.decoding.job import Job, PoolSettings\n"
        "from qwen3_omni_neuron.serving.decoding.pool import DecodingPool\n"
        "from testing.decoding_faults import MODULE, fault\n"
        "from testing.subprocesses import children\n"
        "async def main():\n"
        "    pool = DecodingPool(PoolSettings(deadline_s=3600.0), MODULE)\n"
        "    media = MediaSettings(16000, 12.5, Sizes(16, 2, 2, 1, 1))\n"
        "    job = Job('audio', fault('sleep'), 'here', media)\n"
        "    asyncio.create_task(pool.decode('a', job))\n"
        "    for _ in range(6000):\n"
        "        if children(pool.pid):\n"
        "            break\n"
        "        await asyncio.sleep(0.01)\n"
        "    print(pool.pid, *children(pool.pid), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(map(lives, pids)))


def test_a_result_keeps_no_file_open(shared: Shared) -> None:
    before = len(open_files())
    kept = [shared.decode(job_of("audio", sound("FLAC", "PCM_16"))).item for _ in range(3)]
    assert len(open_files()) == before
    assert all(item["audio"].flags.writeable for item in kept)


def finished(tasks: list["asyncio.Task[Any]"]) -> list[int]:
    return [index for index, task in enumerate(tasks) if task.done()]


def test_owners_take_turns() -> None:
    async def main() -> None:
        turns = Turns(1)
        order: list[str] = []

        async def work_of(owner: str, name: str) -> None:
            await turns.take(owner)
            order.append(name)
            await asyncio.sleep(0)
            turns.give_back(owner)

        names = ("a1", "a2", "a3", "a4", "b1", "b2", "c1")
        await asyncio.gather(*(work_of(name[0], name) for name in names))
        assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]

    asyncio.run(main())


def test_one_owner_leaves_a_place_for_another() -> None:
    async def main() -> None:
        turns = Turns(3)
        tasks = [asyncio.create_task(turns.take("a")) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert finished(tasks) == [0, 1]
        await asyncio.wait_for(turns.take("b"), LONG_S)
        turns.give_back("a")
        await asyncio.wait_for(tasks[2], LONG_S)
        tasks[3].cancel()
        await asyncio.wait([tasks[3]])
        turns.give_back("b")
        turns.give_back("a")
        turns.give_back("a")
        for owner in "abc":
            await asyncio.wait_for(turns.take(owner), LONG_S)

    asyncio.run(main())


def test_a_place_that_is_given_while_its_task_is_cancelled_is_not_lost() -> None:
    async def main() -> None:
        turns = Turns(1)
        await turns.take("a")
        waiting = asyncio.create_task(turns.take("b"))
        await asyncio.sleep(0)
        turns.give_back("a")  # given to the task, which has not run since
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(turns.take("c"), LONG_S)
        other = asyncio.create_task(turns.take("b"))
        await asyncio.sleep(0)
        other.cancel()  # and here it is given after it was cancelled
        turns.give_back("c")
        await asyncio.wait([other])
        await asyncio.wait_for(turns.take("c"), LONG_S)

    asyncio.run(main())


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("rate", [8000, 16000, 24000, 44100])
def test_plain_wav_is_read_inline_as_the_pool_reads_it(
    shared: Shared, rate: int, channels: int
) -> None:
    job = job_of("audio", sound("WAV", "PCM_16", rate, channels))
    inline, sizes = decode_inline(job), list[Measured]()
    assert inline is not None
    decoded = shared.decode(job, sizes.append)
    assert np.array_equal(inline.item["audio"], decoded.item["audio"])
    assert inline.item["audio"].dtype == np.float32
    assert inline.item["sampling_rate"] == decoded.item["sampling_rate"]
    assert inline.measured == decoded.measured
    with pytest.raises(RefusedError) as refused:
        decode_inline(job, refuse)
    assert list(refused.value.args) == sizes


def test_our_own_wav_is_read_inline() -> None:
    samples = tone(0.5)
    data = pcm16(samples)
    decoded = decode_inline(job_of("audio", wav_header(16000, len(data)) + data))
    assert decoded is not None
    assert np.abs(decoded.item["audio"] - samples).max() < 1e-4


def test_plain_wav_that_is_wrong_is_refused_inline(shared: Shared) -> None:
    for job in (
        job_of("audio", sound("WAV", "PCM_16", s=0.01)),
        job_of("audio", sound("WAV", "PCM_16", s=4), most_tokens=20),
        job_of("audio", sound("WAV", "PCM_16", s=4), most_s=3),
    ):
        with pytest.raises(InputError) as found:
            decode_inline(job)
        with pytest.raises(InputError) as expected:
            shared.decode(job)
        assert (found.type, str(found.value)) == (expected.type, str(expected.value))


WAV = sound("WAV", "PCM_16")


@pytest.mark.parametrize(
    "job",
    [
        job_of("image", WAV),
        job_of("audio", b""),
        job_of("audio", b"RIFF"),
        job_of("audio", WAV[:40]),
        job_of("audio", WAV[:-2]),
        job_of("audio", WAV.replace(b"fmt ", b"smt ")),
        job_of("audio", WAV.replace(b"data", b"dat_")),
        job_of("audio", wav_header(16000) + bytes(64000)),
        job_of("audio", wav_header(1000, 64000) + bytes(64000)),
        job_of("audio", WAV[:32] + b"\x03\x00" + WAV[34:]),  # bytes of a frame
        job_of("audio", sound("WAV", "PCM_U8")),
        job_of("audio", wav_header(16000, 2 * pcm.MOST_BYTES) + bytes(2 * pcm.MOST_BYTES)),
        job_of("audio", sound("WAV", "ULAW", 8000)),
        job_of("audio", sound("WAV", "PCM_24")),
        job_of("audio", sound("FLAC", "PCM_16")),
        job_of("audio", sound("WAV", "PCM_16", 16000, 16)),
    ],
)
def test_all_else_is_the_pools(job: Job) -> None:
    assert decode_inline(job) is None


def test_options_of_a_job_are_short(shared: Shared) -> None:
    job = job_of("image", picture("PNG"), options={"max_pixels": "many" * 1000})
    with pytest.raises(OptionError, match="here has options of 4"):
        shared.decode(job)


@pytest.mark.parametrize("wrong", [{"decoders": 0}, {"memory_bytes": 1}, {"deadline_s": 0}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        PoolSettings(**wrong)
