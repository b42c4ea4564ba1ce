"""Image of a message item -> an upright RGB image, checked."""

import contextlib
import importlib
import io
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import ImageError
from qwen3_omni_neuron.prompt.media import libtiff
from qwen3_omni_neuron.prompt.media.fields import (
    Source,
    Warn,
    ignore,
    name_of,
    open_media,
    source_of,
)
from qwen3_omni_neuron.prompt.media.magic import HEAD_BYTES, FileFormat, file_format

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200  # longer side / shorter side; transformers' smart_resize takes no more
FORMATS = {
    **{"JPEG": "JPEG", "PNG": "PNG", "WEBP": "WebP", "GIF": "GIF", "BMP": "BMP", "DIB": "BMP"},
    **{"TIFF": "TIFF", "AVIF": "AVIF", "HEIF": "HEIC", "JPEG2000": "JPEG 2000", "PCX": "PCX"},
    **{"PPM": "PPM", "TGA": "TGA"},
}
"""Formats that are read, Pillow's name: usual name. `open` reads their header alone.

HEIF is read by pillow-heif. ICO and ICNS decode the image inside before its size is known, EPS is a
program that Ghostscript would run, and IPTC holds an image of any format.
"""
Check = Callable[[int, int], "tuple[int, int] | None"]
"""Function of the height and width of a file's image; may raise.

It returns None, or the height and width that the image needs to have at least: a JPEG is then
decoded with a half, a quarter or an eighth of its sides, which saves time and memory.
"""
_CHANNELS = (1, 3, 4)  # grey, RGB, RGBA
_PCX_PALETTE = 769  # bytes at the end of a PCX: a 12, and 256 colours
_SHOWING = threading.Lock()  # guards Python's one function that shows warnings


def load_image(
    item: Mapping[str, Any], where: str, check: Check = ignore, warn: Warn = ignore
) -> "Image":
    """Read an image item of a message, in RGB.

    item["image"] is a path, the bytes of an image file, a PIL image, or an array or tensor
    [height, width], [height, width, channels] or [channels, height, width], channels 1, 3 or 4,
    of uint8 or of floats in [0, 1]. An array that fits both orders has its channels last.

    A file or PIL image is rotated by its EXIF orientation. Transparent pixels become white or a
    mix with white, an animation its first frame, and 16-bit grey its high byte.
    where: name of the item in errors, e.g. "messages[0].content[1]". check: called with the height
    and width of a file's image before it is decoded and rotated. warn: called for a file
    or PIL image that is not used as it is.
    Raises ImageError when it can't be read, has no pixels, has NaN or numbers out of range, or has
    one side more than MAX_ASPECT times the other.
    Source: transformers image_utils.load_image, image_transforms.convert_to_rgb (transformers 5).
    """
    from PIL.Image import Image

    source = item.get("image")
    if source is None:
        raise ImageError(f'{where} has no "image": give a path, bytes, a PIL image or an array.')
    said: list[str] = []
    if (file := source_of(source, where, ImageError)) is not None:
        picture = _read_file(file, where, check, said)
    elif isinstance(source, Image):
        picture = _from_pil(source, where, said)
    else:
        picture = _from_array(source, where)
    if said:
        name = "the PIL image" if file is None else name_of(file)
        warn(f"{where}: {name} is damaged: {'; '.join(dict.fromkeys(said))}. It is used so.")
    return _checked(picture, where)


def _read_file(source: Source, where: str, check: Check, said: list[str]) -> "Image":
    from PIL import Image

    readable = readable_formats()
    name = name_of(source)
    with open_media(source, where, ImageError) as file:
        found = file_format(file.read(HEAD_BYTES))
        file.seek(0)
        if found is not None and found.name not in readable.values():  # TGA would take an ICO
            raise ImageError(f"{where}: {name} is {_other_format(found)}")
        with _image_errors(where, name, found, said), _noted(said):
            opened = Image.open(file, formats=list(readable))
        with opened as picture:
            least = check(picture.height, picture.width)
            if least is not None:
                picture.draft(None, least[::-1])
            with _image_errors(where, name, found, said), _noted(said):
                made = _upright_rgb(picture)
            if picture.format == "PCX" and _lacks_palette(picture, file):
                said.append("its palette is not at its end, so that it is grey")
    return made


def _lacks_palette(picture: "Image", file: BinaryIO) -> bool:
    """Return whether a PCX is grey for want of its palette, which a grey one has, too."""
    file.seek(max(0, file.seek(0, io.SEEK_END) - _PCX_PALETTE))
    return picture.mode == "L" and file.read(1) != b"\x0c"


@contextlib.contextmanager
def _noted(said: list[str]) -> Iterator[None]:
    """Add what Pillow and libtiff warn of to `said`; it would go to the standard error."""

    def note(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            said.append(str(message).strip().rstrip("."))
        else:
            show(message, category, *place, **more)

    with _SHOWING, warnings.catch_warnings(), libtiff.heard(said):
        warnings.simplefilter("always", UserWarning)
        show, warnings.showwarning = warnings.showwarning, note
        yield


def readable_formats() -> dict[str, str]:
    """Return those of FORMATS that the installed Pillow reads.

    Registers pillow-heif where it is installed.
    """
    from PIL import Image

    Image.init()
    if "HEIF" not in Image.OPEN:
        with contextlib.suppress(ImportError):
            heif: Any = importlib.import_module("pillow_heif")
            heif.register_heif_opener()
    return {name: usual for name, usual in FORMATS.items() if name in Image.OPEN}


def _other_format(found: FileFormat) -> str:
    """Return what a file is that can't be read as an image, and what to do."""
    if found.name == "HEIC":
        return (
            "HEIC, for which pillow-heif isn't installed. Run: pip install "
            "'qwen3-omni-neuron[heic]'; or save it as JPEG."
        )
    if found.kind in ("video", "audio"):
        what, part = {"video": ("a video", "video_url"), "audio": ("sound", "input_audio")}[
            found.kind
        ]
        return (
            f'{what} ({found.name}), not an image. Send it as an item of type "{found.kind}" '
            f"({part} over HTTP)."
        )
    return f"{found.name}, which is not read as an image. Save it as PNG or JPEG."


@contextlib.contextmanager
def _image_errors(
    where: str, name: str, found: FileFormat | None, said: list[str]
) -> Iterator[None]:
    """Raise ImageError for any error. said: warnings so far, which tell more than some errors."""
    from PIL import Image

    try:
        yield
    except Image.UnidentifiedImageError as error:
        if found is not None:
            raise ImageError(
                f"{where}: {name} begins as {found.name}, but its header is broken or cut short. "
                "Save it again."
            ) from error
        *others, last = dict.fromkeys(readable_formats().values())
        raise ImageError(
            f"{where}: {name} is not an image. {', '.join(others)} and {last} can be read."
        ) from error
    # The second is a warning: raised only if Python runs with warnings as errors.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{where}: {name} is too large: {error} Shrink it.") from error
    except Exception as error:  # a broken file: the decoders' exceptions have no common class
        reasons = "; ".join(dict.fromkeys([*said, str(error)]))
        raise ImageError(
            f"{where}: {name} is an image that is broken or cut short ({reasons}). Save it again."
        ) from error


def _from_pil(source: "Image", where: str, said: list[str]) -> "Image":
    try:
        with _noted(said):
            return _upright_rgb(source)
    except Exception as error:  # PIL reads lazily: its file may be broken or closed by now
        reasons = "; ".join(dict.fromkeys([*said, str(error)]))
        raise ImageError(f"{where} is a PIL image that can't be read ({reasons}).") from error


def _upright_rgb(picture: "Image") -> "Image":
    from PIL import Image, ImageOps

    picture.load()
    with contextlib.suppress(Exception):  # with broken EXIF the image is not rotated
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):
        picture = Image.fromarray(_high_byte(np.asarray(picture)))
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


def _high_byte(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert 16-bit grey to 8-bit. Pillow's conversion would make all values above 255 white.

    Mode I holds any integers; an image of values up to 255 is taken as 8-bit.
    """
    if values.dtype.itemsize > 2 and values.max(initial=0) <= 255:
        return values.clip(0, 255).astype(np.uint8)
    return (values.clip(0, 65535).astype(np.int64) >> 8).astype(np.uint8)


def _from_array(source: Any, where: str) -> "Image":
    from PIL import Image

    try:
        torch = sys.modules.get("torch")  # if it was not imported, nothing is a tensor
        if torch is not None and isinstance(source, torch.Tensor):
            source = source.detach().cpu()
            source = source.float() if source.is_floating_point() else source
        values = np.asarray(source)
    except Exception as error:  # also an error of the caller's object
        raise ImageError(
            f"{where} is neither a path, bytes, a PIL image nor an array: {error}. Give one of "
            "these."
        ) from error
    pixels = _bytes_of(_channels_last(values, where), where)
    grey = pixels.shape[-1] == 1
    return _upright_rgb(Image.fromarray(pixels[..., 0] if grey else pixels))


def _channels_last(values: NDArray[Any], where: str) -> NDArray[Any]:
    shape = list(values.shape)
    if values.ndim > 0 and values.size == 0:
        raise ImageError(f"{where} is an array of shape {shape}, which holds no pixels.")
    if values.ndim == 2:
        return values[..., None]
    if values.ndim == 3 and shape[-1] in _CHANNELS:
        return values
    if values.ndim == 3 and shape[0] in _CHANNELS:
        return np.moveaxis(values, 0, -1)
    raise ImageError(
        f"{where} is an array of {values.dtype} of shape {shape}; give [height, width], "
        "[height, width, channels] or [channels, height, width], with 1, 3 or 4 channels."
    )


def _bytes_of(values: NDArray[Any], where: str) -> NDArray[np.uint8]:
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if not np.issubdtype(values.dtype, np.floating):
        raise ImageError(
            f"{where} is an array of {values.dtype}; give uint8 (0 to 255) or floats (0 to 1)."
        )
    low, high = float(values.min()), float(values.max())  # NaN if any value is NaN
    if not (low >= 0 and high <= 1):
        raise ImageError(
            f"{where} is an array of floats from {low:g} to {high:g}; they have to be from 0 to 1. "
            "Divide by 255, or give uint8."
        )
    return np.ascontiguousarray(np.round(values * 255), dtype=np.uint8)


def _checked(picture: "Image", where: str) -> "Image":
    width, height = picture.size
    if not width or not height:
        raise ImageError(f"{where} is {width} x {height} pixels: there is nothing to see.")
    aspect = max(width, height) / min(width, height)
    if aspect > MAX_ASPECT:
        raise ImageError(
            f"{where} is {width} x {height} pixels: one side is {aspect:.1f} times the other, "
            f"and {MAX_ASPECT} times is the most. Crop it."
        )
    return picture
