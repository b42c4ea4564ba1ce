"""Pictures in every form a caller may have them."""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from qwen3_omni_neuron.errors import ImageError, PromptTooLongError
from qwen3_omni_neuron.prompt.media.image import load_image

ORIENTATION = 0x0112  # the EXIF tag


def load(image: Any) -> np.ndarray:
    picture = load_image({"type": "image", "image": image}, "here")
    assert picture.mode == "RGB"
    return np.asarray(picture)


def colours(height: int = 5, width: int = 7) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


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


def stored(levels: np.ndarray, bits: int) -> np.ndarray:
    return np.round(levels * (2**bits - 1)).astype(np.uint8 if bits <= 8 else np.uint16)


def on_white(levels: np.ndarray, alpha: np.ndarray | float = 1.0) -> np.ndarray:
    return np.broadcast_to(255 * (levels * alpha + 1 - np.asarray(alpha)), (6, 8, 3))


def png(samples: np.ndarray, kind: int, bits: int, key: bytes = b"") -> bytes:
    """Return a PNG. kind: its colour type. key: the colour that is transparent."""
    digits = (samples.reshape(6, -1, 1).astype(int) >> np.arange(bits)[::-1]) & 1
    rows = np.packbits(np.pad(digits.reshape(6, -1), ((0, 0), (8, 0))).astype(np.uint8), axis=1)
    made, head = b"\x89PNG\r\n\x1a\n", struct.pack(">II5B", 8, 6, bits, kind, 0, 0, 0)
    for chunk in (b"IHDR" + head, b"tRNS" + key, b"IDAT" + zlib.compress(rows.tobytes()), b"IEND"):
        if chunk != b"tRNS":
            made += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return made


def tiff(samples: np.ndarray, tag: int = 0, value: int = 0) -> bytes:
    """Return a TIFF of Pillow with another value of a tag."""
    form = {339: value} if tag == 339 else {}  # not there by default
    content = file_of(Image.fromarray(samples.squeeze()), "TIFF", tiffinfo=form)
    at = content.index(struct.pack("<HHI", tag, 3, 1)) + 8 if tag else len(content)
    return content[:at] + (struct.pack("<H", value) if tag else b"") + content[at + 2 :]


def bmp(samples: np.ndarray) -> bytes:
    """Return a BMP of blue, green, red and alpha, whose header names alpha."""
    rows = samples[::-1].tobytes()
    head = struct.pack("<IiiHHIIiiII", 108, 8, 6, 1, 32, 3, len(rows), 0, 0, 0, 0)
    head += struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000).ljust(68, b"\0")
    return b"BM" + struct.pack("<IHHI", 122 + len(rows), 0, 0, 122) + head + rows


def forms() -> Iterator[tuple[str, bytes, np.ndarray | None]]:
    """Yield every form of a file that Pillow reads, and how it looks; None: refused."""
    both, multiplied = np.dstack([RGB, ALPHA]), np.dstack([RGB * ALPHA, ALPHA])
    white = on_white(RGB, ALPHA)
    for bits in (1, 2, 4, 8, 16):
        for levels, kind in ((GREY, 0), (RGB, 2))[: 1 + (bits >= 8)]:
            numbers = stored(levels, bits)
            key, looks = numbers[3, 3], numbers / (2**bits - 1)
            there = (numbers != key).any(axis=2, keepdims=True)
            yield f"png-{kind}-{bits}", png(numbers, kind, bits), on_white(looks)
            content = png(numbers, kind, bits, key.astype(">u2").tobytes())
            yield f"png-{kind}-{bits}-key", content, on_white(looks, there)
    for bits in (8, 16):
        yield f"png-rgba-{bits}", png(stored(both, bits), 6, bits), white
        yield f"tiff-grey-{bits}", tiff(stored(GREY, bits)), on_white(GREY)
        yield f"tiff-grey-{bits}-0-is-white", tiff(stored(GREY, bits), 262, 0), on_white(1 - GREY)
    la = stored(multiplied, 8)[..., ::3]
    yield "tiff-la-multiplied", tiff(la, 338, 1), on_white(GREY, ALPHA)
    yield "tiff-rgba-multiplied", tiff(stored(multiplied, 8), 338, 1), white
    yield "tiff-rgb-more", tiff(stored(both, 8), 338, 0), on_white(RGB)
    numbers = np.round(GREY * (2**32 - 1)).astype("u4").view("i4")
    yield "tiff-unsigned-32", tiff(numbers, 339, 1), on_white(GREY)
    yield "tiff-signed-32", tiff((GREY * (2**31 - 1)).astype("i4")), on_white(GREY)
    yield "tiff-signed-16", tiff((GREY * (2**15 - 1)).astype("u2"), 339, 2), on_white(GREY)
    for factor, offset in ((1, 0), (255, 0), (999, 0), (2, -1), (np.nan, 0)):
        looks = on_white(GREY) if factor in (1, 255) else None
        yield f"tiff-float-{factor}", tiff((GREY * factor + offset).astype("f4")), looks
    yield "tiff-below-0", tiff((GREY * 1000 - 500).astype("i4")), None
    yield "bmp-alpha", bmp(stored(both[..., [2, 1, 0, 3]], 8)), white
    yield "bmp-alpha-0", bmp(stored(both[..., [2, 1, 0, 3]] * [1, 1, 1, 0], 8)), on_white(RGB)
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}
    names = ["TIFF-CMYK", "TIFF-YCbCr", "BMP-RGB", "WEBP-RGBA", "JPEG-RGB", "JPEG-CMYK", "PNG-LA"]
    for kind, mode in (name.split("-") for name in names):
        levels, channels = (GREY, [0, 0, 0, 3]) if mode[0] == "L" else (RGB, [0, 1, 2, 3])
        pixels = Image.fromarray(stored(both[..., channels], 8))
        pixels = (pixels if mode[-1] == "A" else pixels.convert("RGB")).convert(mode)
        content = file_of(pixels, kind, **options.get(kind, {}))
        yield f"{kind}-{mode}".lower(), content, on_white(levels, ALPHA ** (mode[-1] == "A"))


FORMS = {name: (content, looks) for name, content, looks in forms()}
PIPES = {"png": "png_pipe", "tiff": "tiff_pipe", "bmp": "bmp_pipe"}
# FFmpeg reads 32 bits and floats not at all, and otherwise than their specifications say: key
# colours below 8 bits, multiplied alpha, more samples, signed numbers.
NOT_FFMPEG = re.compile(r"-[124]-key|multiplied|more|signed|float|below-0|ycbcr")


@pytest.mark.parametrize("name", FORMS)
def test_the_numbers_of_a_file_are_read_as_its_format_says(name) -> None:
    content, looks = FORMS[name]
    if looks is None:
        with pytest.raises(ImageError, match=r"^here: \d+ bytes has grey values from "):
            load(content)
        return
    assert np.abs(load(content) - looks).max() <= (5 if "jpeg" in name or "ycbcr" in name else 2)
    if (kind := name.split("-")[0]) in PIPES and not NOT_FFMPEG.search(name):
        with av.open(io.BytesIO(content), format=PIPES[kind]) as file:
            shown = next(file.decode(video=0)).to_ndarray(format="rgba") / 255
        looks = on_white(shown[..., :3], shown[..., 3:])
        assert np.abs(load(content) - looks).max() <= 3, "FFmpeg shows it otherwise"


def test_every_mode_of_a_pil_image_becomes_rgb() -> None:
    grey, both = stored(GREY, 16), stored(np.dstack([RGB, ALPHA]), 8)
    plain = Image.new("RGB", (8, 6), (204, 204, 204))
    for picture, looks in (
        *[(plain.convert(m), 204.0) for m in ("L", "LA", "P", "PA", "HSV", "LAB", "F", "I")],
        (Image.fromarray(both).convert("RGBa"), on_white(RGB, ALPHA)),
        (Image.fromarray(both[..., ::3].copy()).convert("La"), on_white(GREY, ALPHA)),
        (Image.new("RGBA", (8, 6)).quantize(2), on_white(RGB, 0.0)),  # alpha in its palette
        (Image.frombytes("I;16B", (8, 6), grey.astype(">u2").tobytes()), on_white(GREY)),
    ):
        assert np.abs(load(picture) - looks).max() <= 4, picture.mode


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
            "5 bytes is of an unknown format.*Formats of image: JPEG, PNG, WebP, GIF, BMP and TIFF",
        ),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "is EPS or PostScript, which is not supported",
        ),
        (PNG[:12], "damaged or truncated"),
        (PNG[: len(PNG) // 2], "damaged or truncated"),
        (JPEG[: len(JPEG) // 2], "damaged or truncated"),
        (np.zeros((0, 5, 3), np.uint8), r"shape \[0, 5, 3\], which has no pixels"),
        (np.zeros(0), "has no pixels"),
        (Image.new("RGB", (0, 5)), "it is empty"),
        (np.zeros(5), r"shape \[5\]; give"),
        (np.zeros((5, 5, 2)), r"shape \[5, 5, 2\]"),
        (np.zeros((2, 5, 5, 3)), r"shape \[2, 5, 5, 3\]"),
        (np.zeros((5, 5, 3), np.int64), "array of int64; give uint8"),
        (np.zeros((5, 5), bool), "array of bool"),
        (np.full((5, 5, 3), np.nan), "floats from nan to nan"),
        (np.full((5, 5, 3), 2.0), "Divide by 255"),
        (np.full((5, 5, 3), -0.1), "must be from 0 to 1"),
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
    said = rf"^here: \d+ bytes is {kind}, which is not supported. Convert it"
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
        "used anyway."
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
