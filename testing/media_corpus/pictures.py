"""Pictures in every format that Pillow writes here, and damages of them."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from testing.media_corpus.sounds import AFTER, BEFORE, CUTS

SIZE = (60, 40)  # width, height
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "I;16", "I", "F", "LAB", "HSV", "PA")
_LOSSY = ("AVIF", "GIF", "JPEG", "JPEG2000", "MPO", "WEBP")
_CONVERTED = {  # by the writer, to something else than what a mode looks like
    **dict.fromkeys(("AVIF", "WEBP"), ("P", "I;16", "I")),
    "GIF": ("RGBA", "LA", "I;16", "I"),
    **dict.fromkeys(("BMP", "DIB", "PPM"), ("RGBA",)),  # without transparency
}


@dataclass(frozen=True)
class Picture:
    """A picture file. name: what was done to it. seen: uint8 [height, width, 3], what is in it."""

    form: str
    mode: str
    name: str
    content: bytes
    seen: np.ndarray

    @property
    def damage(self) -> str:
        """Kind of what was done, such as "cut"."""
        return self.name.split(":")[0]

    @property
    def tolerance(self) -> float:
        """Difference to `seen`, on average over pixels and colours."""
        return 10.0 if self.form in _LOSSY else 1.0

    def __str__(self) -> str:
        return f"{self.form} {self.mode}, {self.name}"


def forms() -> list[str]:
    """Return the names of the formats that Pillow writes."""
    Image.init()
    return sorted(Image.SAVE)


def picture(mode: str) -> Image.Image:
    """Return a picture of which every part looks unlike the others."""
    width, height = SIZE
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    rgb = np.stack([x, y, (x + y) / 2], axis=-1)
    whole = Image.fromarray((rgb * 255).astype(np.uint8))
    if mode in ("RGBA", "LA", "PA"):
        whole.putalpha(Image.fromarray(((1 - x) * 255).astype(np.uint8)))
    if mode == "I;16":
        return Image.fromarray((rgb[..., 2] * 65535).astype(np.uint16))
    if mode == "I":
        return Image.fromarray((rgb[..., 2] * 65535).astype(np.int32))
    if mode == "LAB":
        from PIL import ImageCms

        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        made = ImageCms.applyTransform(whole, ImageCms.buildTransform(*profiles, "RGB", "LAB"))
        assert made is not None
        return made
    return whole.convert(mode)


def seen(mode: str) -> np.ndarray:
    """Return what a picture of a mode looks like on white, uint8 [height, width, 3]."""
    made = picture(mode)
    if mode in ("I;16", "I"):
        high = (np.asarray(made) >> 8).astype(np.uint8)
        return np.stack([high] * 3, axis=-1)
    if mode == "LAB":
        return np.asarray(picture("RGB"))
    if mode in ("RGBA", "LA", "PA"):
        made = made.convert("RGBA")
        made = Image.alpha_composite(Image.new("RGBA", made.size, "white"), made)
    return np.asarray(made.convert("RGB"))


def pictures(form: str, *, every: bool) -> Iterator[Picture]:
    """Yield a whole file of each mode that the format takes, and damaged ones.

    every: damaged ones of each mode. Otherwise each mode has one of the damages.
    """
    for turn, mode in enumerate(MODES):
        content = b"" if mode in _CONVERTED.get(form, ()) else _saved(form, picture(mode))
        if content:
            case = Picture(form, mode, "whole", content, seen(mode))
            yield case
            damaged = _damaged(case)
            yield from damaged if every else damaged[turn :: len(MODES)]


def _saved(form: str, made: Image.Image) -> bytes:
    file = io.BytesIO()
    try:
        made.save(file, form)
    except Exception:  # a mode that the format does not have, or a writer without its library
        return b""
    return file.getvalue()


def _damaged(case: Picture) -> list[Picture]:
    content, size = case.content, len(case.content)
    ends = [round(size * (tenth + 0.5) / CUTS) for tenth in range(CUTS)]
    made = [
        ("joined", 2 * content),
        *((f"cut: at {end} of {size}", content[:end]) for end in ends),
        *((f"before: {name}", junk + content) for name, junk in BEFORE.items()),
        *((f"after: {name}", content + junk) for name, junk in AFTER.items()),
    ]
    return [replace(case, name=name, content=damaged) for name, damaged in made]
