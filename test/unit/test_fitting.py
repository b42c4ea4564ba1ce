"""Sizes of images and videos: as their fields say, or shrunk so that a conversation fits."""

import io
import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qwen3_omni_neuron.errors import InputError, PromptTooLongError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.fitting import Fitted, Room, TurnsRoom, shares
from qwen3_omni_neuron.prompt.media import items
from qwen3_omni_neuron.prompt.media.item_fields import MOST_PIXELS
from qwen3_omni_neuron.prompt.media.sizes import SizeLimits, Sizes, VisualSize
from qwen3_omni_neuron.prompt.media.video import load_video
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.prompt.truncation import ConversationPart, Truncation, with_media
from testing.made_videos import make_video
from testing.media_cases import noise_frames, noise_image, text, tone, user
from testing.tiny.sizes import read_text

SIZES = Sizes.of(json.loads(read_text("preprocessor_config.json")))
PHONE = (3024, 4032)
CONTEXT = 8192


@pytest.fixture(scope="module")
def prompt_builder(checkpoint: Path, config: OmniConfig) -> PromptBuilder:
    return PromptBuilder(checkpoint, config)


def size_of(grid: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Return frames, height and width in pixels, and tokens."""
    return (grid[0] * 2, *SIZES.pixels(grid), SIZES.tokens(grid))


def image(height: int, width: int, **fields: Any) -> VisualSize:
    return VisualSize("here", height, width, None, SizeLimits.of(fields))


def video(frames: int, height: int, width: int, **fields: Any) -> VisualSize:
    return VisualSize("here", height, width, frames, SizeLimits.of(fields))


def shown(item: VisualSize, share: int) -> tuple[int, int, int]:
    """Return the grid of an item with a share."""
    limits = {**vars(item.asked), "most_tokens": share}
    return SIZES.grid(
        VisualSize("here", item.height, item.width, item.frames, SizeLimits(**limits))
    )


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ((100, 100), (96, 96)),
        ((10, 10), (64, 64)),
        ((10, 1500), (32, 1504)),
        ((1080, 1920), (1088, 1920)),
        ((16, 3000), (32, 3008)),
        ((5000, 5000), (4096, 4096)),
        ((33, 3), (224, 32)),
    ],
)
def test_a_size_that_is_asked_for_is_qwen_omni_utils(
    asked: tuple[int, int], size: tuple[int, int]
) -> None:
    """Computed by qwen-omni-utils 0.0.9 with patches of 16 pixels."""
    fields = dict(zip(("resized_height", "resized_width"), asked, strict=True))
    for item in (image(70, 90, **fields), video(4, 70, 90, **fields)):
        assert SIZES.pixels(SIZES.grid(item)) == size


@pytest.mark.parametrize(
    ("frames", "sides", "fields", "size"),
    [
        (100, (1080, 1920), {"total_pixels": 20_000_000}, (448, 832)),
        (100, (1080, 1920), {"total_pixels": 1_000_000}, (256, 480)),
        (16, (720, 1280), {"total_pixels": 3_000_000, "max_pixels": 200_000}, (320, 576)),
        (8, (720, 1280), {"total_pixels": 3_000_000, "min_pixels": 300_000}, (640, 1152)),
        (8, (720, 1280), {"total_pixels": 1_000_000, "min_pixels": 300_000}, (416, 736)),
        (7, (64, 64), {"total_pixels": 10**9}, (384, 384)),
        (24, (480, 854), {"total_pixels": 2_000_001}, (288, 544)),
        (2, (3024, 4032), {"total_pixels": 10**12}, (768, 1024)),
        (8, (720, 1280), {"total_pixels": 100_000, "min_pixels": 4096}, (96, 192)),
    ],
)
def test_all_pixels_of_a_video_are_limited_as_in_qwen_omni_utils(
    frames: int, sides: tuple[int, int], fields: dict[str, int], size: tuple[int, int]
) -> None:
    """Computed by qwen-omni-utils 0.0.9 with patches of 16 pixels."""
    assert SIZES.pixels(SIZES.grid(video(frames, *sides, **fields))) == size


def test_total_pixels_do_not_limit_an_image() -> None:
    assert SIZES.grid(image(640, 640, total_pixels=1)) == SIZES.grid(image(640, 640))


@pytest.mark.parametrize(
    ("item", "frames_size_tokens"),
    [
        (image(*PHONE, detail="low"), (2, 416, 576, 234)),
        (image(*PHONE, detail="auto"), (2, 3008, 4032, 11844)),
        (image(*PHONE, detail="high"), (2, 3008, 4032, 11844)),
        (image(*PHONE, detail="original"), (2, 3008, 4032, 11844)),
        (image(200, 300, detail="low"), (2, 192, 288, 54)),
        (image(*PHONE, detail="low", min_pixels=500_000), (2, 416, 576, 234)),
        (video(8, 1080, 1920, detail="low"), (8, 256, 480, 480)),
        (video(8, 1080, 1920), (8, 640, 1152, 2880)),
    ],
)
def test_detail_sets_the_size(item: VisualSize, frames_size_tokens: tuple[int, ...]) -> None:
    assert size_of(SIZES.grid(item)) == frames_size_tokens


def test_no_size_of_an_image_has_more_than_256_tokens_at_low_detail() -> None:
    for height in (1, 9, 33, 200, 511, 512, 900, 4000):
        for width in (1, 17, 100, 512, 513, 2000, 9000):
            if max(height, width) <= 200 * min(height, width):
                item = image(height, width, detail="low")
                assert SIZES.tokens(SIZES.grid(item)) <= 256, (height, width)


@pytest.mark.parametrize(
    ("share", "size"),
    [
        (12000, (3008, 4032, 11844)),
        (11844, (3008, 4032, 11844)),
        (11843, (3008, 4000, 11750)),
        (6655, (2240, 3008, 6580)),
        (64, (192, 288, 54)),
    ],
)
def test_an_image_is_shrunk_to_its_share(share: int, size: tuple[int, int, int]) -> None:
    assert size_of(shown(image(*PHONE), share))[1:] == size


def test_a_flat_image_is_shrunk_to_its_share_too() -> None:
    item = image(20, 4000)
    assert size_of(SIZES.grid(item))[1:] == (32, 4000, 125)
    assert size_of(shown(item, 70))[1:] in [(32, 2240, 70), (32, 2208, 69)]


@pytest.mark.parametrize(
    ("share", "size"),
    [
        (43200, (120, 640, 1152, 43200)),
        (20000, (120, 416, 768, 18720)),
        (7200, (120, 256, 480, 7200)),
        (7199, (118, 256, 480, 7080)),
        (1000, (16, 256, 480, 960)),
        (240, (4, 256, 480, 240)),
    ],
)
def test_a_videos_frames_are_shrunk_first_and_then_their_number(
    share: int, size: tuple[int, int, int, int]
) -> None:
    assert size_of(shown(video(120, 1080, 1920), share)) == size


@pytest.mark.parametrize(
    ("item", "share", "advice"),
    [
        (image(*PHONE), 53, "Shorten the conversation, or load"),
        (image(*PHONE, min_pixels=10**6), 900, r"Lower its min_pixels \(now 1000000\), shorten"),
        (image(*PHONE, detail="high"), 9000, r"Leave its detail out, .* max_pixels \(now 12845056"),
        (
            image(9, 9, resized_height=640, resized_width=640),
            399,
            "Lower its resized_height and resized_width, shorten",
        ),
        (video(120, 1080, 1920), 239, "Shorten the conversation, or load"),
        (video(120, 1080, 1920, nframes=60), 3599, "Ask for fewer frames of it, shorten"),
        (video(120, 1080, 1920, min_frames=60), 3599, "Ask for fewer frames of it, shorten"),
    ],
)
def test_what_does_not_fit_is_refused_with_advice_that_helps(
    item: VisualSize, share: int, advice: str
) -> None:
    said = rf"^here is .* pixels, which makes \d+ vision tokens.*; {share} is the most. {advice}"
    with pytest.raises(PromptTooLongError, match=said):
        shown(item, share)


@pytest.mark.parametrize("value", [MOST_PIXELS, 2**31, 1, 10**9])
def test_numbers_of_any_size_give_a_size_or_an_error_of_ours(value: int) -> None:
    for name in ("min_pixels", "max_pixels", "total_pixels", "min_frames", "nframes"):
        for item in (image(*PHONE, **{name: value}), video(9, *PHONE, **{name: value})):
            for share in (1, 100, 10**6):
                try:
                    assert SIZES.tokens(shown(item, share)) <= share
                except InputError as error:
                    assert str(error).startswith("here ")


def fitted(items: list[VisualSize], wanted: int, most: int = 10**9) -> list[int]:
    """Return the tokens of items that share a room."""
    given = shares(SIZES, items, Room(most, wanted, wanted))
    return [SIZES.tokens(shown(item, share)) for item, share in zip(items, given, strict=True)]


def test_all_that_fit_keep_their_sizes() -> None:
    assert fitted([image(*PHONE), image(320, 320)], 11944) == [11844, 100]
    assert fitted([image(*PHONE), image(320, 320)], 11943) == [11750, 100]


def test_images_share_what_the_small_and_the_fixed_ones_leave() -> None:
    small, fixed = image(320, 320), image(640, 640, detail="high")
    made = fitted([image(*PHONE), small, image(*PHONE), fixed, image(2000, 2000)], 6500)
    assert made == [1938, 100, 1938, 400, 2025]


def test_a_video_has_four_times_an_images_share() -> None:
    made = fitted([image(*PHONE), video(120, 1080, 1920)], 6655)
    assert made == [1302, 5280]


def test_what_is_shrunk_as_far_as_it_may_be_takes_the_replys_room() -> None:
    items = [image(*PHONE)] * 20
    assert fitted(items, 100, 1080) == [54] * 20
    with pytest.raises(
        PromptTooLongError,
        match=r"^here is an image of 4032 x 3024 pixels, which makes 54 vision tokens when it is "
        r"shrunk as far as it may be, and all 20 images and videos 1080; 1079 fit into the context "
        r"beside the rest\. Send fewer at a time, shorten the conversation, or load with a larger "
        r"context_length\.$",
    ):
        fitted(items, 100, 1079)


def test_the_room_is_that_beside_the_text_and_the_reply() -> None:
    # For shares text counts in steps of 512 tokens, and a reply of 1,024 or more with an eighth of
    # 8,192.
    assert Room.beside(1, CONTEXT - 1, 2000) == Room(8190, 8190, 8191 - 512 - 1024)
    assert Room.beside(512, CONTEXT - 1, 1024) == Room(7679, 7679, 8191 - 512 - 1024)
    assert Room.beside(513, CONTEXT - 1, 100) == Room(7678, 7678, 8191 - 1024 - 100)
    assert Room.beside(9000, CONTEXT - 1, 100) == Room(0, 0, 0)


def jpeg(height: int, width: int, **options: Any) -> bytes:
    file = io.BytesIO()
    noise_image(width, height).save(file, "JPEG", **options)
    return file.getvalue()


def grids(prompt: Prompt) -> list[tuple[int, int, int]]:
    return [visual.grid for visual in (*prompt.images, *prompt.videos)]


def test_an_image_is_unchanged_where_it_fits_and_shrunk_where_not(
    prompt_builder: PromptBuilder,
) -> None:
    picture = noise_image(640, 480)
    messages = [user(text("What is this?"), {"type": "image", "image": picture})]
    whole = prompt_builder.prompt(messages)
    kept = prompt_builder.prompt(messages, most_tokens=511, reply_tokens=60)
    assert grids(kept) == grids(whole) == [(1, 30, 40)]
    assert np.array_equal(kept.images[0].pixels, whole.images[0].pixels)
    assert kept.warnings == ()
    shrunk = prompt_builder.prompt(messages, most_tokens=255, reply_tokens=32)
    assert grids(shrunk) == [(1, 22, 30)]
    assert shrunk.warnings == (
        "messages[0].content[1] is an image of 640 x 480 pixels (300 tokens); it is shown to the "
        "model with 480 x 352 (165 tokens), so that the conversation fits into the context. To "
        "show more of it, load with a larger context_length or send less beside it.",
    )
    assert len(shrunk) + 32 <= 256
    resized = picture.resize((480, 352), Image.Resampling.BICUBIC)
    assert np.array_equal(shrunk.images[0].pixels[0], np.asarray(resized))


def test_what_fits_beside_the_text_to_the_token_is_unchanged(
    prompt_builder: PromptBuilder,
) -> None:
    messages = [user(text("What is this?"), {"type": "image", "image": noise_image(640, 480)})]
    whole = prompt_builder.prompt(messages)
    kept = prompt_builder.prompt(messages, most_tokens=len(whole), reply_tokens=60)
    assert grids(kept) == grids(whole)
    less = prompt_builder.prompt(messages, most_tokens=len(whole) - 1, reply_tokens=60)
    assert SIZES.tokens(grids(less)[0]) < SIZES.tokens(grids(whole)[0])


def test_every_form_of_an_image_has_the_same_size(
    prompt_builder: PromptBuilder, tmp_path: Path
) -> None:
    picture = noise_image(640, 480)
    path = tmp_path / "picture.png"
    picture.save(path)
    forms: list[Any] = [picture, np.asarray(picture), path, str(path), path.read_bytes()]
    forms.append(np.asarray(picture).transpose(2, 0, 1))
    for form in forms:
        messages = [user({"type": "image", "image": form}, {"type": "image", "image": picture})]
        made = prompt_builder.prompt(messages, most_tokens=511)
        assert grids(made) == [(1, 26, 36)] * 2
        assert np.array_equal(made.images[0].pixels, made.images[1].pixels)


def test_the_frames_of_a_video_that_is_shrunk_are_evenly_spread(
    prompt_builder: PromptBuilder,
) -> None:
    frames = noise_frames(16, 64, 64)
    for number, frame in enumerate(frames):
        frame[:] = number
    item = {"type": "video", "video": frames, "fps": 4.0}
    made = prompt_builder.prompt([user(item)], most_tokens=1023)
    (visual,) = made.videos
    assert visual.pixels[:, 0, 0, 0].tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]
    assert made.warnings[0].startswith(
        "messages[0].content[0] is a video of 16 frames of 64 x 64 pixels (1152 tokens); it is "
        "shown to the model with 12 frames of 384 x 384 (864 tokens)"
    )


def test_the_frames_of_a_file_are_those_of_a_file_with_fewer_frames(
    prompt_builder: PromptBuilder,
) -> None:
    content = make_video(40, rate=4)
    item = {"type": "video", "video": content}
    made = prompt_builder.prompt([user(item)], most_tokens=1023)
    (visual,) = made.videos
    expected = prompt_builder.prompt([user({**item, "max_frames": len(visual.pixels)})])
    assert len(visual.pixels) < 20
    assert np.array_equal(visual.pixels, expected.videos[0].pixels)
    assert made.positions.equal(expected.positions)


@pytest.mark.parametrize(("rotation", "most_tokens"), [(0, None), (90, 500)])
def test_a_files_frames_are_resized_one_by_one(
    prompt_builder: PromptBuilder,
    monkeypatch: pytest.MonkeyPatch,
    rotation: int,
    most_tokens: int | None,
) -> None:
    """Whole frames of a minute in 4K would take 3 GB."""
    item = {"type": "video", "video": make_video(15, rotation=rotation), "fps": 5.0}
    messages, kept = [user(item)], list[tuple[int, ...]]()

    def load(*args: Any, **named: Any) -> Any:
        video = load_video(*args, **named)
        kept.append(video.frames.shape)
        return video

    monkeypatch.setattr(items, "load_video", load)
    (visual,) = prompt_builder.prompt(messages, most_tokens=most_tokens).videos
    assert kept == [visual.pixels.shape]
    whole = load_video(item, "here", audio_rate=None).frames
    assert np.array_equal(visual.pixels, prompt_builder._pixels.video(whole, visual.grid).pixels)


def test_a_long_video_of_which_all_frames_are_asked_for_is_refused_for_its_tokens(
    prompt_builder: PromptBuilder,
) -> None:
    item = {"type": "video", "video": make_video(16, rate=4), "nframes": 16}
    with pytest.raises(PromptTooLongError, match=r"1120 vision tokens .* Ask for fewer frames"):
        prompt_builder.prompt([user(item)], most_tokens=1023)


def test_turns_that_can_be_dropped_do_not_shrink_an_image(prompt_builder: PromptBuilder) -> None:
    picture = {"type": "image", "image": noise_image(480, 480)}
    old = [user(text("word " * 60)), {"role": "assistant", "content": "Yes."}]
    limits = Truncation(511)
    made = prompt_builder.prompt([*old, user(picture)], most_tokens=511, truncation=limits)
    assert grids(made) == [(1, 30, 30)]
    assert not made.warnings
    kept = prompt_builder.prompt([*old, user(picture)], most_tokens=511)
    assert SIZES.tokens(grids(kept)[0]) < 225


def test_a_jpeg_is_decoded_reduced_only_where_it_is_shrunk_to_fit(
    prompt_builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL.JpegImagePlugin import JpegImageFile

    content, decoded = jpeg(800, 1200), []
    load = JpegImageFile.load

    def noted(self: Any) -> Any:
        decoded.append(self.size)
        return load(self)

    monkeypatch.setattr(JpegImageFile, "load", noted)
    item = {"type": "image", "image": content}
    prompt_builder.prompt([user(item)])
    prompt_builder.prompt([user({**item, "max_pixels": 50_000})])
    assert set(decoded) == {(1200, 800)}
    decoded.clear()
    made = prompt_builder.prompt([user({**item, "detail": "low"})])
    assert set(decoded) == {(1200, 800)}
    assert grids(made) == [(1, 26, 38)]
    decoded.clear()
    small = prompt_builder.prompt([user(item)], most_tokens=200)
    assert set(decoded) == {(600, 400)}
    assert grids(small) == [(1, 22, 34)]
    assert "is an image of 1200 x 800 pixels (950 tokens)" in small.warnings[0]


def test_a_rotated_jpeg_that_is_decoded_reduced_stands_upright(
    prompt_builder: PromptBuilder,
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = jpeg(800, 1200, exif=exif)
    made = prompt_builder.prompt([user({"type": "image", "image": content})], most_tokens=200)
    assert grids(made) == [(1, 34, 22)]
    assert "is an image of 800 x 1200 pixels" in made.warnings[0]


QUESTION = 20
"""Tokens of a turn's text in these tests; INSTRUCTIONS those of what is before it."""
INSTRUCTIONS = 30


def turns(*media: int, text_tokens: int = QUESTION, **limits: Any) -> TurnsRoom:
    """Return the room of a conversation of questions, with so many media each, and replies."""
    parts, before = list[ConversationPart](), 0
    for number, count in enumerate(media):
        begin = 1 + 2 * number
        parts.append(ConversationPart("user", begin, before, text_tokens))
        before += count
        parts.append(ConversationPart("assistant", begin + 1, before, text_tokens))
    reply = limits.pop("reply_tokens", 1024)
    truncation = Truncation(CONTEXT - 1024, **limits)
    return TurnsRoom(truncation, INSTRUCTIONS, parts[:-1], CONTEXT - 1, reply)


def test_a_conversation_that_fits_keeps_its_sizes_under_truncation() -> None:
    """To the token: the most tokens are those that truncation keeps, without the reply's room."""
    room, photo = turns(1, 1), image(1024, 768)
    left = CONTEXT - 1024 - INSTRUCTIONS - 3 * QUESTION - 2 * 768
    assert room.fit(SIZES, [photo, photo]) == Fitted(0, 0, [768, 768])
    assert turns(1, 2).fit(SIZES, [photo, left, photo]) == Fitted(0, 0, [768, left, 768])
    less = turns(1, 2).fit(SIZES, [photo, left + 1, photo])
    assert less.begin == 0
    assert less.shares[0] == less.shares[2] < 768


def test_images_of_turns_that_are_dropped_take_nothing() -> None:
    """Their text and replies fill the context: what stays has the same shares as alone."""
    photos = [image(*PHONE)] * 12
    for number in (2, 5, 12):
        room = turns(*[1] * number, text_tokens=1000)
        fitted = room.fit(SIZES, photos[:number])
        kept = number - fitted.media_begin
        assert fitted.begin == (1 + 2 * fitted.media_begin if number > 2 else 0)
        assert kept == 2
        alone = Room.beside(INSTRUCTIONS + 3 * 1000, CONTEXT - 1, 1024)
        assert fitted.shares == shares(SIZES, photos[:2], alone)


@pytest.mark.parametrize("retained", [1.0, 0.8, 0.5])
@pytest.mark.parametrize("text_tokens", [20, 200, 700])
def test_what_is_kept_fits_and_is_cut_no_more(retained: float, text_tokens: int) -> None:
    generator = np.random.default_rng(5)
    for number in range(1, 15):
        counts = [int(count) for count in generator.integers(0, 3, number)]
        media = [
            int(generator.integers(1, 900))
            if generator.random() < 0.3
            else image(*(int(side) for side in generator.integers(100, 3000, 2)))
            for _ in range(sum(counts))
        ]
        room = turns(*counts, text_tokens=text_tokens, retained=retained)
        fitted = room.fit(SIZES, media)
        first = next((at for at, part in enumerate(room.parts) if part.begin == fitted.begin), 0)
        kept = zip(media[fitted.media_begin :], fitted.shares, strict=True)
        tokens = [
            share if isinstance(medium, int) else SIZES.tokens(shown(medium, share))
            for medium, share in kept
        ]
        taken = with_media(room.parts, [*[0] * fitted.media_begin, *tokens])[first:]
        if first < len(room.parts) - 1:
            assert INSTRUCTIONS + sum(p.tokens for p in taken) <= room.truncation.most_tokens
        assert room.truncation.first_kept(INSTRUCTIONS, taken) == 0


def test_a_photo_keeps_its_size_for_some_turns_and_stays_until_text_needs_half_of_its_room() -> (
    None
):
    found = [
        turns(1, *[0] * more, text_tokens=100).fit(SIZES, [image(*PHONE)]) for more in range(24)
    ]
    given = [SIZES.tokens(shown(image(*PHONE), one.shares[0])) for one in found if one.shares]
    step, most = CONTEXT // 16, CONTEXT - 1 - 1024
    half = (most - step) // 2
    texts = [INSTRUCTIONS + 100 * (2 * more + 1) for more in range(len(given))]
    left = [max(half, most - math.ceil(tokens / step) * step) for tokens in texts]
    assert given == [fitted([image(*PHONE)], tokens)[0] for tokens in left]
    assert len(set(given)) == 8
    assert texts[-1] + half <= CONTEXT - 1024 < texts[-1] + 200 + half
    assert [one.shares for one in found[len(given) :]] == [[]] * (24 - len(given))


def test_text_that_is_old_leaves_a_new_image_at_least_half() -> None:
    fitted = turns(*[0] * 40, 1, text_tokens=100).fit(SIZES, [image(*PHONE)])
    half = (CONTEXT - 1 - 512 - 1024) // 2
    assert half <= fitted.shares[0] < half + 200
    small = turns(*[0] * 40, 1, text_tokens=100).fit(SIZES, [image(640, 640)])
    assert small.shares == [400]
    assert small.begin < fitted.begin


@pytest.mark.parametrize(("earlier", "kept", "tokens"), [(40, 18, 3300), (5, 5, 5590)])
def test_the_example_of_truncation_is_true(earlier: int, kept: int, tokens: int) -> None:
    """It stands in docs/options.md. A turn and its reply have 200 tokens of text."""
    photo = image(*PHONE)
    found = turns(*[0] * earlier, 1, text_tokens=100).fit(SIZES, [photo])
    assert found.begin == (1 + 2 * (earlier - kept) if kept < earlier else 0)
    assert SIZES.tokens(shown(photo, found.shares[0])) == tokens


def test_a_last_turn_that_does_not_fit_alone_is_refused_with_its_images() -> None:
    photos = [image(*PHONE, detail="high")]
    with pytest.raises(PromptTooLongError, match="11844 vision tokens; 8141 fit into the context"):
        turns(0, 0, 1).fit(SIZES, photos)
    assert turns(1, 0, 0).fit(SIZES, photos) == Fitted(3, 1, [])


def test_dropped_images_are_neither_shown_nor_read(prompt_builder: PromptBuilder) -> None:
    """A prompt is the one of its kept turns alone, and the image of an earlier one is broken."""
    pictures = [{"type": "image", "image": jpeg(480, 640)}]  # 300 tokens
    pictures.insert(0, {"type": "image", "image": pictures[0]["image"][:5000]})

    def asked(count: int) -> list[dict[str, Any]]:
        yes = {"role": "assistant", "content": "Yes."}
        turns = [[user(pictures[n < 6], text("word " * 4)), yes] for n in range(count, 0, -1)]
        return [{"role": "system", "content": "Hm."}, *chain.from_iterable(turns)][:-1]

    limits: dict[str, Any] = {"most_tokens": 511, "truncation": Truncation(448)}
    limits["reply_tokens"] = 64
    whole = prompt_builder.prompt(asked(6), **limits)
    count = len(whole.images)
    assert 1 < count < 6
    alone = prompt_builder.prompt(asked(count), **limits)
    assert whole.token_ids.equal(alone.token_ids)
    assert grids(whole) == grids(alone)
    assert len(whole) <= 448
    assert all(
        warning.startswith(f"messages[{11 - 2 * back}]")
        for back, warning in enumerate(reversed(whole.warnings))
    )


def test_sound_beside_a_videos_frames_takes_its_share(prompt_builder: PromptBuilder) -> None:
    item = {"type": "video", "video": noise_frames(16, 64, 64), "fps": 4.0}
    sound = {"audio": iter([tone(20.0)]), "sampling_rate": 16000}
    heard = prompt_builder.prompt([user({**item, **sound})], True, 1023, reply_tokens=64)
    alone = prompt_builder.prompt([user(item)], True, 1023, reply_tokens=64)
    assert heard.audio_tokens == 260
    assert len(heard) + 64 <= 1024
    assert grids(heard) < grids(alone)
    whole = prompt_builder.prompt([user({**item, **sound, "audio": tone(20.0)})], True)
    assert torch.equal(heard.audio_mel[0], whole.audio_mel[0])
    unheard = prompt_builder.prompt([user({**item, **sound})], False, 1023, reply_tokens=64)
    assert grids(unheard) == grids(alone)
