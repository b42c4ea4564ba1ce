"""Decoded media give the prompt of their file, or the refusal that the API gives."""

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from qwen3_omni_neuron.errors import InputError, PromptTooLongError
from qwen3_omni_neuron.events.encoding import wav_header
from qwen3_omni_neuron.helpers.job import Measured
from qwen3_omni_neuron.helpers.media import MOST_INLINE_BYTES, decode_inline
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.items import Media, MediaLoader
from qwen3_omni_neuron.prompt.prompt import Prompt
from testing.decoding_cases import SharedPool, grey_video, job_of, picture, sound
from testing.made_recordings import make_recording
from testing.made_videos import make_video
from testing.media_cases import QUESTION_WAV, noise_image, user

ORIENTATION = 0x0112


def wav_of_infinity() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.full(16000, np.inf), 16000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return picture("JPEG", exif=exif)


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


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPool]:
    pool = SharedPool()
    yield pool
    pool.close()


def loaded(load: MediaLoader, kind: str, item: dict[str, Any]) -> Media:
    """Read one item as a conversation's."""
    return load.read(kind, item, "here")


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
    "wav-float": lambda: sound("WAV", "FLOAT", 48000, 6),
    "wav-of-mu-law": lambda: sound("WAV", "ULAW", 8000),
    "flac-stereo": lambda: sound("FLAC", "PCM_24", 96000, 2),
    "mp3": lambda: sound("MP3", "MPEG_LAYER_III", 24000),
    "mp3-of-guessed-length": without_length,
    "opus": lambda: sound("OGG", "OPUS", 48000),
    "m4a": lambda: make_recording("ipod", "aac", rate=44100, channels=2),
    "mp4": lambda: make_video(audio="aac"),
    "just-long-enough": lambda: sound("FLAC", "PCM_16", 44100, s=0.03),
}
IMAGES: dict[str, tuple[Callable[[], bytes], dict[str, Any]]] = {
    "png": (lambda: picture("PNG"), {}),
    "gif": (lambda: picture("GIF"), {}),
    "tiff": (lambda: picture("TIFF", compression="tiff_lzw"), {}),
    "rotated": (rotated, {}),
    "clear": (lambda: picture("PNG", noise_image(90, 70).convert("RGBA").rotate(9)), {}),
    "grey-16": (
        lambda: picture("PNG", Image.fromarray(np.arange(4200, dtype=np.uint16).reshape(60, 70))),
        {},
    ),
    "cmyk": (lambda: picture("JPEG", noise_image(90, 70).convert("CMYK")), {}),
    "enlarged": (lambda: picture("PNG"), {"min_pixels": 90_000}),
    "shrunk": (lambda: picture("PNG"), {"max_pixels": 5_000}),
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
    "avi": (lambda: make_video(container="avi", codec="libx264", b_frames=2), {"fps": 7}),
    "webm": (lambda: make_video(container="webm", codec="libvpx", rate=15), {"max_frames": 6}),
    "uneven": (lambda: make_video(5, times_ms=[0, 40, 700, 710, 1500]), {}),
    "rotated": (lambda: make_video(turned=(90, False, False)), {"min_pixels": 1024}),
    "shrunk": (make_video, {"max_pixels": 1024, "fps": 10.0}),
    "narrow": (lambda: grey_video(4, 2000, 10), {"min_pixels": 1024}),
}


@pytest.mark.parametrize("name", AUDIO)
def test_a_decoded_sound_gives_the_prompt_of_its_file(shared, prompt_builder, name) -> None:
    content = AUDIO[name]()
    decoded = shared.decode(job_of("audio", content, media=prompt_builder.media_settings))
    expected = prompt_builder.prompt([user({"type": "audio", "audio": content})])
    assert_equal(prompt_builder.prompt([user(decoded.item)]), expected)
    assert decoded.item["audio"].dtype == np.float32


@pytest.mark.parametrize("name", IMAGES)
def test_a_decoded_image_gives_the_prompt_of_its_file(shared, prompt_builder, name) -> None:
    make, options = IMAGES[name]
    content = make()
    job = job_of("image", content, media=prompt_builder.media_settings, options=options)
    sizes: list[Measured] = []
    decoded = shared.decode(job, sizes.append)
    expected = prompt_builder.prompt([user({"type": "image", "image": content, **options})])
    assert_equal(prompt_builder.prompt([user(decoded.item)]), expected)
    assert [measured.size for measured in sizes] == [decoded.item["image"].nbytes]


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("name", VIDEOS)
def test_a_decoded_video_gives_the_prompt_of_its_file(shared, prompt_builder, name, heard) -> None:
    make, options = VIDEOS[name]
    content = make()
    media = prompt_builder.media_settings
    job = job_of("video", content, media=media, options=options, use_audio_in_video=heard)
    decoded = shared.decode(job)
    file = {"type": "video", "video": content, **options}
    expected = prompt_builder.prompt([user(file)], use_audio_in_video=heard)
    assert_equal(prompt_builder.prompt([user(decoded.item)], use_audio_in_video=heard), expected)


REFUSED: dict[str, tuple[str, Callable[[], bytes], dict[str, Any]]] = {
    "no-sound": ("audio", lambda: b"hello", {}),
    "short-sound": ("audio", lambda: sound("FLAC", "PCM_16", s=0.01), {}),
    "head-of-a-flac": ("audio", lambda: sound("FLAC", "PCM_16")[:60], {}),
    "infinite": ("audio", wav_of_infinity, {}),
    "no-image": ("image", lambda: b"hello", {}),
    "ico": ("image", lambda: picture("ICO"), {}),
    "cut-png": ("image", lambda: picture("PNG")[:5000], {}),
    "too-narrow": ("image", lambda: picture("PNG", noise_image(201, 1)), {}),
    "no-video": ("video", lambda: b"hello", {}),
    "cut-mp4": ("video", lambda: make_video()[: len(make_video()) // 2], {}),
    "no-rate": ("video", make_video, {"fps": 0}),
    "too-narrow-video": ("video", lambda: grey_video(4, 2010, 10), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_as_the_api_refuses_it(shared, prompt_builder, name) -> None:
    kind, make, options = REFUSED[name]
    content = make()
    with pytest.raises(InputError) as expected:
        loaded(prompt_builder.loader(False, None), kind, {kind: content, **options})
    with pytest.raises(InputError) as found:
        shared.decode(job_of(kind, content, media=prompt_builder.media_settings, options=options))
    addresses = re.compile("0x[0-9a-f]+")  # of Python's objects, in libsndfile's messages
    assert found.type is expected.type
    assert addresses.sub("", str(found.value)) == addresses.sub("", str(expected.value))


def test_a_sound_of_too_many_tokens_is_refused_as_the_api_refuses_it(
    shared, prompt_builder
) -> None:
    content = sound("FLAC", "PCM_16", s=4)
    with pytest.raises(PromptTooLongError) as expected:
        loaded(prompt_builder.loader(False, 20), "audio", {"audio": content})
    job = job_of("audio", content, media=prompt_builder.media_settings, most_tokens=20)
    with pytest.raises(PromptTooLongError) as found:
        shared.decode(job)
    assert str(found.value) == str(expected.value)


def test_sound_of_a_video_that_is_too_long_is_refused_while_it_is_decoded(
    shared, prompt_builder
) -> None:
    content = make_video(audio="aac", audio_s=9)
    expected = "^here \\(its audio\\) lasts 6.* but"
    with pytest.raises(PromptTooLongError, match=expected):
        loaded(prompt_builder.loader(True, 90), "video", {"video": content, "max_pixels": 1024})
    fields = {"most_tokens": 90, "use_audio_in_video": True, "options": {"max_pixels": 1024}}
    with pytest.raises(PromptTooLongError, match=expected):
        shared.decode(job_of("video", content, media=prompt_builder.media_settings, **fields))


class RefusedError(Exception):
    """A refusal by the caller's budget."""


def refuse(measured: Measured) -> None:
    raise RefusedError(measured)


def test_the_budget_is_asked_before_anything_is_decoded(shared) -> None:
    for job, measured in (
        # 600 s of silence: 1 kB that becomes 38 MB.
        (lambda: job_of("audio", flac_of_silence(600)), Measured(600.0, 0, 38_400_000)),
        (
            lambda: job_of("image", picture("PNG", Image.new("1", (4096, 4096)))),
            Measured(0.0, 4096 * 4096, 3 * 3584 * 3584),
        ),
        (
            lambda: job_of("video", make_video(audio="aac"), use_audio_in_video=True),
            Measured(1.021678, 48 * 64, 4 * 3 * 320 * 448 + 4 * 16347),
        ),
    ):
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


def test_the_budget_is_asked_again_where_a_file_is_longer_than_it_said(shared) -> None:
    job = job_of("video", heard_longer_than_seen(), use_audio_in_video=True)
    sizes: list[Measured] = []
    decoded = shared.decode(job, sizes.append)
    first, second = sizes
    assert first.size < second.size == sum(decoded.item[n].nbytes for n in ("video", "audio"))
    assert second.seconds == pytest.approx(2.5, abs=0.1)

    def refuse_the_second(measured: Measured) -> None:
        if measured.size > first.size:
            raise RefusedError

    with pytest.raises(RefusedError):
        shared.decode(job, refuse_the_second)


def test_frames_are_made_small_while_they_are_decoded(shared) -> None:
    """In their own size they would take 1.5 GB, of the 512 MiB that a decoder has here."""
    options = {"fps": 30.0, "max_pixels": 32 * 32}
    decoded = shared.decode(job_of("video", grey_video(240, 1920, 1080), options=options))
    assert decoded.item["video"].shape == (240, 32, 32, 3)


def test_plain_wav_is_read_inline_as_the_pool_reads_it(shared) -> None:
    for channels in (1, 2, 5):
        for rate in (8000, 16000, 24000, 44100):
            job = job_of("audio", sound("WAV", "PCM_16", rate, channels))
            inline, sizes = decode_inline(job), list[Measured]()
            decoded = shared.decode(job, sizes.append)
            assert np.array_equal(inline.item["audio"], decoded.item["audio"])
            assert inline.item["audio"].dtype == np.float32
            assert inline.item["sampling_rate"] == decoded.item["sampling_rate"]
            with pytest.raises(RefusedError) as refused:
                decode_inline(job, refuse)
            assert list(refused.value.args) == sizes


def test_plain_wav_that_is_wrong_is_refused_inline(shared) -> None:
    for job in (
        job_of("audio", sound("WAV", "PCM_16", s=0.01)),
        job_of("audio", sound("WAV", "PCM_16", s=4), most_tokens=20),
    ):
        with pytest.raises(InputError) as found:
            decode_inline(job)
        with pytest.raises(InputError) as expected:
            shared.decode(job)
        assert (found.type, str(found.value)) == (expected.type, str(expected.value))


WAV, LARGE = sound("WAV", "PCM_16"), 2 * MOST_INLINE_BYTES


def test_no_other_sound_or_file_is_decoded_in_the_servers_process() -> None:
    for job in (
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
        job_of("audio", wav_header(16000, LARGE) + bytes(LARGE)),
        job_of("audio", sound("WAV", "ULAW", 8000)),
        job_of("audio", sound("WAV", "PCM_24")),
        job_of("audio", sound("FLAC", "PCM_16")),
        job_of("audio", sound("WAV", "PCM_16", 16000, 16)),
    ):
        assert decode_inline(job) is None


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_a_part_of_a_sound_is_that_of_the_api(shared, kind) -> None:
    content, part = sound(kind, "PCM_16", s=2), {"audio_start": 0.5, "audio_end": 1.25}
    job = job_of("audio", content, options=part)
    sizes: list[Measured] = []
    at_once = decode_inline(job, sizes.append)
    assert (at_once is None) == (kind == "FLAC")
    decoded = at_once or shared.decode(job, sizes.append)
    expected = load_waveform({"audio": content, **part}, 16000, "here")
    assert np.array_equal(decoded.item["audio"], expected)
    assert [size.seconds for size in sizes] == [0.75]


def test_a_joined_wav_file_is_left_to_the_pool(shared) -> None:
    job = job_of("audio", sound("WAV", "PCM_16", s=1) * 2)
    assert decode_inline(job) is None
    assert "32044 bytes after its end are ignored" in shared.decode(job).warnings[0]
