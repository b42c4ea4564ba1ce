"""Size of a picture by its header: Pillow's, or none at all."""

import io
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from qwen3_omni_neuron.helpers.inline import picture_size
from testing.decoding_cases import picture

SIZE = (150, 290)


def pictured(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    return picture(kind, Image.new(mode, SIZE), **options)


def commented(segments: int) -> bytes:
    """Return a JPEG with comments before its size."""
    content, comment = pictured("JPEG"), b"\xff\xfe\x01\x02" + bytes(256)
    return content[:2] + segments * comment + content[2:]


def bmp_of_os2() -> bytes:
    """Return a BMP whose header has sides of 16 bits."""
    width, height = SIZE
    pixels = bytes((3 * width + 3) // 4 * 4 * height)
    head = struct.pack("<2sIHHI", b"BM", 26 + len(pixels), 0, 0, 26)
    return head + struct.pack("<IHHHH", 12, width, height, 1, 24) + pixels


FILES = {
    "PNG": pictured("PNG"),
    "GIF": pictured("GIF", "P"),
    "BMP": pictured("BMP"),
    "BMP of OS/2": bmp_of_os2(),
    "JPEG": pictured("JPEG"),
    "progressive JPEG": pictured("JPEG", progressive=True),
    "grey JPEG with comments": commented(20),
    "JPEG with a profile": pictured("JPEG", icc_profile=bytes(100_000)),
    "WebP": pictured("WEBP"),
    "WebP without loss": pictured("WEBP", lossless=True),
    "WebP with transparency": pictured("WEBP", "RGBA"),
    "WebP with a profile": pictured("WEBP", icc_profile=bytes(300)),
}


@pytest.mark.parametrize("name", FILES)
def test_the_size_in_a_header_is_the_size_that_pillow_reads(name: str) -> None:
    width, height = Image.open(io.BytesIO(FILES[name])).size
    assert picture_size(FILES[name]) == (height, width) == SIZE[::-1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"BM",
        bytes(100),
        pictured("TIFF"),
        commented(400),
        FILES["PNG"][:20],
        FILES["JPEG"][:9],
    ],
    ids=["empty", "BMP cut", "zeros", "TIFF", "endless JPEG", "PNG cut", "JPEG cut"],
)
def test_a_header_that_is_cut_or_unknown_has_no_size(content: bytes) -> None:
    assert picture_size(content) is None


@given(st.sampled_from(list(FILES.values())), st.integers(0, 40), st.binary(max_size=30))
@example(FILES["PNG"], 16, bytes(8))
def test_no_content_is_an_error(content: bytes, at: int, noise: bytes) -> None:
    size = picture_size(content[:at] + noise + content[at + len(noise) :])
    assert size is None or min(size) > 0
