"""Image of a message item -> an upright RGB image, checked."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import ImageError
from qwen3_omni_neuron.prompt.media.fields import (
    Source,
    Warn,
    ignore,
    name_of,
    open_media,
    read_format,
    source_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200  # longer side / shorter side; transformers' smart_resize takes no more
_PILLOW = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # the only formats that it may find
Check = Callable[[int, int], object]
"""Function of the height and width of a file's image; may raise."""
_CHANNELS = (1, 3, 4)
_SHOWING = threading.Lock()  # guards Python's one function that shows warnings


def load_image(
    item: Mapping[str, Any], where: str, check: Check = ignore, warn: Warn = ignore
) -> "Image":
    """Read an image item of a message, in RGB.

    item["image"] is a path, the bytes of an image file, a PIL image, or an array or tensor [height,
    width], [height, width, channels] or [channels, height, width], of uint8 or of floats in [0, 1].
    EXIF turns it, transparent pixels are mixed with white, an animation is its first frame, and
    16-bit grey its high byte.
    check: called with the height and width of a file's image before it is decoded. warn: called for
    a damaged image.
    Raises ImageError.
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

    read_format(source, where, "image")
    name = name_of(source)
    with open_media(source, where, ImageError) as file:
        with _image_errors(where, name), _noted(said):
            opened = Image.open(file, formats=_PILLOW)
        with opened as picture:
            check(picture.height, picture.width)
            with _image_errors(where, name), _noted(said):
                return _upright_rgb(picture)


@contextlib.contextmanager
def _noted(said: list[str]) -> Iterator[None]:
    """Add what Pillow warns of to `said`; it would go to the standard error."""
    with _SHOWING, warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in noted:
        if issubclass(warning.category, UserWarning):
            said.append(str(warning.message).strip().rstrip("."))
        else:
            warnings.warn(warning.message, stacklevel=2)


@contextlib.contextmanager
def _image_errors(where: str, name: str) -> Iterator[None]:
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    # The second is a warning: raised only if Python runs with warnings as errors.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{where}: {name} is too large: {error} Shrink it.") from error
    except Exception as error:  # a broken file: the decoders' exceptions have no common class
        # The message of this one has the address of an object.
        why = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise ImageError(
            f"{where}: {name} is an image that is broken or cut short{why}. Save it again."
        ) from error


def _from_pil(source: "Image", where: str, said: list[str]) -> "Image":
    try:
        with _noted(said):
            return _upright_rgb(source)
    except Exception as error:  # PIL reads lazily: its file may be broken or closed by now
        raise ImageError(f"{where} is a PIL image that can't be read ({error}).") from error


def _upright_rgb(picture: "Image") -> "Image":
    from PIL import Image, ImageOps

    picture.load()
    with contextlib.suppress(Exception):
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):
        picture = Image.fromarray(_high_byte(np.asarray(picture)))
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


def _high_byte(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert 16-bit grey to 8-bit; mode I with values up to 255 is taken as 8-bit."""
    if values.dtype.itemsize > 2 and values.max(initial=0) <= 255:
        return values.clip(0, 255).astype(np.uint8)
    return (values.clip(0, 65535).astype(np.int64) >> 8).astype(np.uint8)


def _from_array(source: Any, where: str) -> "Image":
    from PIL import Image

    try:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(source, torch.Tensor):
            source = source.detach().cpu()
            source = source.float() if source.is_floating_point() else source
        values = np.asarray(source)
    except Exception as error:
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
    low, high = float(values.min()), float(values.max())
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
