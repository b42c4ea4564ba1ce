"""Pictures in every form a caller may have them."""

import io
import re
import struct
import warnings
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from qwen3_omni_neuron.errors import ImageError, PromptTooLongError
from qwen3_omni_neuron.prompt.media.image import load_image
from testing.made_pictures import bmp, png, tiff

ORIENTATION = 0x0112  # the EXIF tag


def load(image: Any) -> np.ndarray:
    picture = load_image({"type": "image", "image": image}, "here")
    assert picture.mode == "RGB"
    return np.asarray(picture)


def colours(height: int = 5, width: int = 7) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def file_of(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def never(*_: Any) -> None:
    raise AssertionError("it is decoded")


def test_every_form_of_a_picture_is_the_same_picture(tmp_path) -> None:
    pixels = colours()
    path = tmp_path / "picture.png"
    path.write_bytes(file_of(Image.fromarray(pixels)))
    for image in (
        path,
        str(path),
        path.read_bytes(),
        bytearray(path.read_bytes()),
        Image.fromarray(pixels),
        Image.open(path),
        pixels,
        pixels.transpose(2, 0, 1),
        pixels.astype(np.float64) / 255,
        torch.from_numpy(pixels),
        torch.from_numpy(pixels).permute(2, 0, 1),
        (torch.from_numpy(pixels).float() / 255).requires_grad_(),
    ):
        assert np.array_equal(load(image), pixels), type(image)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("opened", [False, True])
def test_pictures_are_turned_as_their_exif_says(turn, opened) -> None:
    upright = np.zeros((8, 16, 3), np.uint8)
    upright[:4, :4], upright[:4, -4:] = 255, 100
    # How a camera that is held that way stores the upright picture: the inverse of each turn.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[turn]
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    data = file_of(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    assert np.array_equal(load(Image.open(io.BytesIO(data)) if opened else data), upright)


def test_broken_exif_spoils_no_picture() -> None:
    pixels = colours()
    data = file_of(Image.fromarray(pixels), exif=b"Exif\0\0not exif at all")
    assert np.array_equal(load(data), pixels)


def test_what_is_transparent_is_shown_on_white() -> None:
    pixels = np.dstack([colours(), np.full((5, 7), 255, np.uint8)])
    pixels[0, :, 3], pixels[1, :, 3] = 0, 51
    expected = pixels[..., :3].copy()
    expected[0] = 255
    expected[1] = np.round(255 * 0.8 + pixels[1, :, :3] * 0.2)
    for image in (pixels, Image.fromarray(pixels), file_of(Image.fromarray(pixels))):
        assert np.abs(load(image).astype(int) - expected).max() <= 1


def test_16_bit_grey_keeps_its_greys() -> None:
    wide = np.array([[0, 256, 32768, 65535]], np.uint16)
    for image in (file_of(Image.fromarray(wide)), Image.fromarray(wide.astype(np.int32))):
        assert load(image)[0, :, 0].tolist() == [0, 1, 128, 255]
    assert load(Image.fromarray(np.array([[0, 200]], np.int32)))[0, :, 0].tolist() == [0, 200]


# Levels from 0 to 1, [height, width, 1] and [height, width, 3]; alpha is 0, half and 1 by rows.
GREY = np.linspace(0, 1, 48).reshape(6, 8, 1)
RGB = np.concatenate([GREY, 1 - GREY, np.roll(GREY, 5)], axis=2)
ALPHA = np.repeat([0, 128 / 255, 1, 1, 1, 1], 8).reshape(6, 8, 1)
PALETTE = np.round(RGB.reshape(-1, 3)[:4] * 255).astype(np.uint8)


def stored(levels: np.ndarray, bits: int) -> np.ndarray:
    kind = np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32
    return np.round(levels * (2**bits - 1)).astype(kind)


def on_white(levels: np.ndarray, alpha: np.ndarray | float = 1.0) -> np.ndarray:
    return np.broadcast_to(255 * (levels * alpha + 1 - np.asarray(alpha)), (6, 8, 3))


def keyed(levels: np.ndarray, bits: int) -> tuple[bytes, np.ndarray]:
    """A PNG one of whose values is transparent, and how it looks."""
    numbers = stored(levels, bits)
    key = numbers[3, 3]
    chunk = {b"tRNS": key.astype(">u2").tobytes()}
    there = (numbers != key).any(axis=2, keepdims=True)
    kind = 0 if len(key) == 1 else 2
    return png(numbers, kind, bits, chunk), on_white(numbers / (2**bits - 1), there)


def pillow(mode: str, kind: str) -> tuple[bytes, np.ndarray]:
    """A file as Pillow writes it, and how it looks."""
    pixels = Image.fromarray(stored(np.concatenate([RGB, ALPHA], axis=2), 8))
    levels = np.asarray(pixels.convert("L"))[..., None] / 255 if mode[0] == "L" else RGB
    pixels = pixels.convert("LA") if mode[0] == "L" else pixels
    pixels = pixels if "A" in mode else pixels.convert("L" if mode == "L" else "RGB").convert(mode)
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}
    return file_of(pixels, kind, **options.get(kind, {})), on_white(levels, ALPHA ** ("A" in mode))


def forms() -> Iterator[tuple[str, tuple[bytes, np.ndarray | None]]]:
    """Yield every form of a file that Pillow reads, and how it looks; None: refused."""
    for bits in (1, 2, 4, 8, 16):
        grey = stored(GREY, bits)
        looks = on_white(grey / (2**bits - 1))
        yield f"png-grey-{bits}", (png(grey, 0, bits, {}), looks)
        yield f"png-grey-{bits}-key", keyed(GREY, bits)
        yield f"tiff-grey-{bits}", (tiff(grey, bits, 1), looks)
        yield f"tiff-grey-{bits}-0-is-white", (tiff(grey, bits, 0), 255 - looks)
    for bits in (8, 16):
        both = stored(np.concatenate([RGB, ALPHA], axis=2), bits)
        whole = on_white(RGB, ALPHA)
        yield f"png-rgb-{bits}", (png(both[..., :3], 2, bits, {}), on_white(RGB))
        yield f"png-rgb-{bits}-key", keyed(RGB, bits)
        yield f"png-rgba-{bits}", (png(both, 6, bits, {}), whole)
        yield f"png-la-{bits}", (png(both[..., ::3], 4, bits, {}), on_white(GREY, ALPHA))
        yield f"tiff-rgb-{bits}", (tiff(both[..., :3], bits, 2), on_white(RGB))
        yield f"tiff-rgba-{bits}", (tiff(both, bits, 2, extra=[2]), whole)
        yield f"tiff-rgbx-{bits}", (tiff(both, bits, 2, extra=[0]), on_white(RGB))
        times = stored(np.concatenate([RGB * ALPHA, ALPHA], axis=2), bits)
        yield f"tiff-rgba-{bits}-multiplied", (tiff(times, bits, 2, extra=[1]), whole)
        yield (
            f"tiff-cmyk-{bits}",
            (tiff(stored(np.dstack([RGB, 0 * GREY]), bits), bits, 5), on_white(1 - RGB)),
        )
    la = stored(np.concatenate([GREY, ALPHA], axis=2), 8)
    yield "tiff-la", (tiff(la, 8, 1, extra=[2]), on_white(GREY, ALPHA))
    la = stored(np.concatenate([GREY * ALPHA, ALPHA], axis=2), 8)
    yield "tiff-la-multiplied", (tiff(la, 8, 1, extra=[1]), on_white(GREY, ALPHA))
    index = np.arange(48).reshape(6, 8, 1) % 4
    chunks = {b"PLTE": PALETTE.tobytes(), b"tRNS": bytes([0, 128])}
    alpha = np.array([0, 128 / 255, 1, 1])[index]
    looks = on_white(PALETTE[index[..., 0]] / 255, alpha)
    for bits in (2, 4, 8):
        yield f"png-palette-{bits}", (png(index.astype("u1"), 3, bits, chunks), looks)
    yield "tiff-grey-12", (tiff(stored(GREY, 12), 12, 1), on_white(GREY))
    for name, form, levels, bits in (
        ("unsigned-32", 1, stored(GREY, 32), 32),
        ("signed-32", 2, (GREY * (2**31 - 1)).astype("i4"), 32),
        ("signed-16", 2, (GREY * (2**15 - 1)).astype("i2"), 16),
        ("float", 3, GREY.astype("f4"), 32),
        ("float-to-255", 3, (GREY * 255).astype("f4"), 32),
    ):
        yield f"tiff-{name}", (tiff(levels, bits, 1, form=form), on_white(GREY))
    for name, form, levels, bits in (
        ("below-0", 2, (GREY * 1000 - 500).astype("i4"), 32),
        ("float-below-0", 3, (GREY * 2 - 1).astype("f4"), 32),
        ("float-above-255", 3, (GREY * 999).astype("f4"), 32),
        ("nan", 3, (GREY * np.nan).astype("f4"), 32),
        ("half", 3, GREY.astype("f2"), 16),
        ("double", 3, GREY.astype("f8"), 64),
    ):
        yield f"tiff-{name}", (tiff(levels, bits, 1, form=form), None)
    bgr = stored(RGB[..., ::-1], 8)
    yield "bmp-alpha", (bmp(np.dstack([bgr, stored(ALPHA, 8)])), on_white(RGB, ALPHA))
    yield "bmp-alpha-0", (bmp(np.dstack([bgr, 0 * bgr[..., :1]])), on_white(RGB))
    for mode, kind in (
        *[(mode, "TIFF") for mode in ("L", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")],
        *[("RGB", "BMP"), ("L", "BMP"), ("L", "GIF"), ("RGB", "WEBP"), ("RGBA", "WEBP")],
        *[("L", "JPEG"), ("RGB", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("LA", "PNG")],
    ):
        yield f"pillow-{mode}-{kind}", pillow(mode, kind)


FORMS = dict(forms())
PIPES = {"png": "png_pipe", "tiff": "tiff_pipe", "bmp": "bmp_pipe"}
# FFmpeg reads 32 bits, floats and half floats not at all, and otherwise than their specifications
# say: key colours below 8 bits, multiplied alpha, CMYK of 16 bits, more samples, signed numbers.
NOT_FFMPEG = re.compile(r"-[124]-key|multiplied|cmyk-16|rgbx|signed|float|half|double|nan|below-0")


@pytest.mark.parametrize("name", FORMS)
def test_the_numbers_of_a_file_are_read_as_its_format_says(name) -> None:
    content, looks = FORMS[name]
    if looks is None:
        with pytest.raises(ImageError, match=r"^here: \d+ bytes (has grey|is an image that)"):
            load(content)
        return
    off = 5 if name.endswith(("JPEG", "YCbCr-TIFF")) else 2
    assert np.abs(load(content) - looks).max() <= off


@pytest.mark.parametrize(
    "name", [n for n in FORMS if n.split("-")[0] in PIPES and not NOT_FFMPEG.search(n)]
)
def test_a_file_looks_as_ffmpeg_shows_it(name) -> None:
    with av.open(io.BytesIO(FORMS[name][0]), format=PIPES[name.split("-")[0]]) as file:
        shown = next(file.decode(video=0)).to_ndarray(format="rgba") / 255
    looks = on_white(shown[..., :3], shown[..., 3:])
    assert np.abs(load(FORMS[name][0]) - looks).max() <= 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "YCbCr", "HSV", "F", "RGBX"])
def test_every_mode_becomes_rgb(mode) -> None:
    shown = load(Image.new("RGB", (6, 4), (200, 200, 200)).convert(mode))
    assert shown.shape == (4, 6, 3)
    assert mode == "1" or np.abs(shown.astype(int) - 200).max() <= 4


def test_modes_of_pil_images_that_no_file_has() -> None:
    pixels = Image.fromarray(stored(np.concatenate([RGB, ALPHA], axis=2), 8))
    grey = stored(GREY, 16)
    for picture, looks in (
        (pixels.convert("RGBa"), on_white(RGB, ALPHA)),
        (Image.fromarray(stored(np.dstack([GREY, ALPHA]), 8)).convert("La"), on_white(GREY, ALPHA)),
        (Image.new("RGBA", (8, 6)).quantize(2), on_white(RGB, 0.0)),  # alpha in its palette
        (Image.frombytes("I;16B", (8, 6), grey.astype(">u2").tobytes()), on_white(GREY)),
        (Image.frombytes("I;16L", (8, 6), grey.astype("<u2").tobytes()), on_white(GREY)),
        (Image.fromarray(grey[..., 0].astype("i4")), on_white(GREY)),
    ):
        assert np.abs(load(picture) - looks).max() <= 3, picture.mode


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), (level, 0, 0)) for level in (250, 5)]
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert load(data)[0, 0].tolist() == [250, 0, 0]


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1)])
def test_the_smallest_and_the_longest_picture_can_be_seen(size) -> None:
    assert load(np.zeros((*size, 3), np.uint8)).shape == (*size, 3)


PNG = file_of(Image.fromarray(colours(64, 64)))
JPEG = file_of(Image.fromarray(colours(64, 64)), "JPEG")


def test_what_cannot_be_seen_is_refused() -> None:
    for image, said in (
        (None, 'no "image"'),
        ("/nowhere/x.png", "does not exist"),
        ("a" * 5000, "can't be opened"),
        ("a\0b", "can't be opened"),
        (b"", "0 bytes"),
        (
            b"hello",
            "5 bytes is something else.*JPEG, PNG, WebP, GIF, BMP and TIFF are read as image",
        ),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "is EPS or PostScript, which is not read",
        ),
        (PNG[:12], "broken or cut short"),
        (PNG[: len(PNG) // 2], "broken or cut short"),
        (JPEG[: len(JPEG) // 2], "broken or cut short"),
        (np.zeros((0, 5, 3), np.uint8), r"shape \[0, 5, 3\], which holds no pixels"),
        (np.zeros(0), "holds no pixels"),
        (Image.new("RGB", (0, 5)), "nothing to see"),
        (np.zeros(5), r"shape \[5\]; give"),
        (np.zeros((5, 5, 2)), r"shape \[5, 5, 2\]"),
        (np.zeros((2, 5, 5, 3)), r"shape \[2, 5, 5, 3\]"),
        (np.zeros((5, 5, 3), np.int64), "array of int64; give uint8"),
        (np.zeros((5, 5), bool), "array of bool"),
        (np.full((5, 5, 3), np.nan), "floats from nan to nan"),
        (np.full((5, 5, 3), 2.0), "Divide by 255"),
        (np.full((5, 5, 3), -0.1), "have to be from 0 to 1"),
        (np.zeros((1, 201, 3), np.uint8), "201.0 times the other"),
        (np.zeros((402, 2, 3), np.uint8), "201.0 times the other"),
        (object(), "array of object"),
        ([[1], [1, 2]], "neither a path"),
    ):
        with pytest.raises(ImageError, match=rf"(?s)^here.*{said}"):
            load(image)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_file_is_looked_at_before_it_is_decoded(monkeypatch, kind) -> None:
    """Its size is known then: no format that is read decodes while it is opened."""
    told = []

    def refuse(height: int, width: int) -> None:
        told.append((height, width))
        raise PromptTooLongError("too long")

    data = file_of(Image.fromarray(colours(50, 70)), kind)
    monkeypatch.setattr(ImageFile.ImageFile, "load", never)
    with pytest.raises(PromptTooLongError):
        load_image({"image": data}, "here", refuse)
    assert told == [(50, 70)]


OTHERS = {
    "HEIC": b"\0\0\0\x20ftypheic" + bytes(99),
    "AVIF": b"\0\0\0\x20ftypavif" + bytes(99),
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(99),
    "PPM": b"P6 4 4 255 " + bytes(48),
    "an icon": file_of(Image.fromarray(colours(64, 64)), "ICO"),
    "ICNS": file_of(Image.fromarray(colours(64, 64)), "ICNS"),
    "EPS or PostScript": file_of(Image.fromarray(colours(64, 64)), "EPS"),
    "PDF": file_of(Image.fromarray(colours(64, 64)), "PDF"),
    "PSD": b"8BPS" + bytes(100),
    "JPEG XL": b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(100),
    "SVG": b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>',
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_formats_are_named_and_not_opened(monkeypatch, kind) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", never)
    said = rf"^here: \d+ bytes is {kind}, which is not read. Convert it"
    with pytest.raises(ImageError, match=said):
        load(OTHERS[kind])


def test_videos_and_sound_are_sent_where_they_belong() -> None:
    for data, said in (
        (b"\0\0\0\x20ftypisom" + bytes(99), r'a video \(MP4\).*item of type "video" \(video_url'),
        (b"\x1aE\xdf\xa3" + bytes(99), r"a video \(WebM or Matroska\)"),
        (b"RIFF\0\0\0\0AVI LIST" + bytes(99), r"a video \(AVI\)"),
        ((b"G" + bytes(187)) * 3, r"a video \(MPEG-TS\)"),
        (b"OggS" + bytes(24) + b"OpusHead", r'sound \(Ogg\).*item of type "audio" \(input_audio'),
        (b"RIFF\0\0\0\0WAVEfmt " + bytes(99), r"sound \(WAV\)"),
        (b"\0\0\0\x20ftypM4A " + bytes(99), r"sound \(M4A\)"),
    ):
        with pytest.raises(ImageError, match=f"^here: {len(data)} bytes is {said}"):
            load(data)


def test_a_decompression_bomb_is_refused_and_a_large_picture_is_not(monkeypatch) -> None:
    data = file_of(Image.new("L", (30, 30)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)  # 900 are more than twice as many
    with pytest.raises(ImageError, match=r"^here: \d+ bytes is too large: .*900 pixels"):
        load(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 800)
    with pytest.warns(Image.DecompressionBombWarning):
        assert load(data).shape == (30, 30, 3)


def warnings_of(data: bytes) -> list[str]:
    said: list[str] = []
    load_image({"image": data}, "here", warn=said.append)
    return said


@pytest.mark.filterwarnings("error")
def test_what_pillow_says_of_a_damaged_file_is_passed_on() -> None:
    """A TIFF has a description that is too long to be in it; warnings are shown as before."""
    shown = warnings.showwarning
    data = file_of(Image.fromarray(colours()), "TIFF", description="It has some words.")
    entry = data.index(struct.pack("<HH", 270, 2))
    broken = data[: entry + 4] + struct.pack("<I", 10**6) + data[entry + 8 :]
    assert warnings_of(data) == []
    assert warnings_of(broken) == [
        f"here: {len(data)} bytes is damaged: Tag data larger than file. Skipping tag 270. It is "
        "used so."
    ]
    assert np.array_equal(load(broken), colours())
    assert warnings.showwarning is shown


def test_the_callers_picture_stays_as_it_is() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    picture = Image.open(io.BytesIO(file_of(Image.new("RGBA", (4, 8)), exif=exif)))
    load(picture)
    assert (picture.mode, picture.size) == ("RGBA", (4, 8))
    pixels = colours()
    load(pixels)
    assert np.array_equal(pixels, colours())
